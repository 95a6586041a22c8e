"""Settings that vLLM's CPU platform takes away from models with latent attention.

`CpuPlatform.check_and_update_config` sees a model with MLA on a CPU without AMX and thinks of its
own backend, CPU_MLA: it forces blocks of 16 tokens (of 256 for DeepSeek-V4), switches chunked
prefill and prefix caching off and raises the token budget. The backends of ascend-attn-backends
have none of these limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ascend_vllm_plugin import compat, selection

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@contextmanager
def latent_settings_kept(vllm_config: VllmConfig) -> Iterator[None]:
    """Undo what the platform's checks change in the settings of an MLA model.

    Nothing is undone for other models, and where the user named a CPU backend of vLLM, whose limits
    are real.
    """
    if not _ours(vllm_config):
        yield
        return
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    block_size = cache.block_size if cache.user_specified_block_size else compat.CPU_BLOCK_SIZE
    prefix_caching = cache.enable_prefix_caching
    chunked_prefill, budget = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
    yield
    cache.block_size = block_size
    cache.enable_prefix_caching = prefix_caching
    scheduler.enable_chunked_prefill = chunked_prefill
    scheduler.max_num_batched_tokens = budget


def _ours(vllm_config: VllmConfig) -> bool:
    model = vllm_config.model_config
    return (
        model is not None
        and model.use_mla
        and selection.user_choice(vllm_config.attention_config.backend) is None
    )
