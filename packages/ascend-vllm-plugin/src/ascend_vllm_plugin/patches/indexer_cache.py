"""A cache of index rows as they are computed.

vLLM's `DeepseekV32IndexerCache` holds rows quantised to fp8 with their scales, as bytes, and names
a backend that only CUDA, ROCm and XPU have. The operators for Ascend take rows in the dtype of the
model. The class is not pluggable, so its name in the module that builds it is replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.models import deepseek_v2

from ascend_vllm_plugin.adapters.indexer import IndexerBackend
from ascend_vllm_plugin.patches.replacement import replace_name

if TYPE_CHECKING:
    from vllm.config import CacheConfig


class AscendIndexerCache(deepseek_v2.DeepseekV32IndexerCache):  # type: ignore[misc]
    """Index rows [num_blocks, block_size, index_size] in the dtype of the model."""

    def __init__(
        self, head_dim: int, dtype: torch.dtype, prefix: str, cache_config: CacheConfig
    ) -> None:
        from vllm.config import get_current_vllm_config

        model: Any = get_current_vllm_config().model_config
        super().__init__(model.hf_text_config.index_head_dim, model.dtype, prefix, cache_config)

    def get_attn_backend(self) -> type[IndexerBackend]:
        """Whose metadata the cache is written and read with."""
        return IndexerBackend


def apply() -> bool:
    """Put the class in the place of vLLM's."""
    replace_name(deepseek_v2, AscendIndexerCache, "DeepseekV32IndexerCache")
    return True
