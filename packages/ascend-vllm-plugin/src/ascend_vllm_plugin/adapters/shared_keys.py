"""What layers have in common whose keys ranks share (decode context parallel).

Of latent layers vLLM wants one part: it gathers the query heads of all ranks, asks for attention
over the keys of this one, and merges the parts by their lse. A dense layer does all of this itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ascend_attn_backends import BackendRequest, ContextShard
from ascend_attn_ops import PartialAttention, Refusal
from ascend_vllm_plugin.adapters.layer import refusal
from ascend_vllm_plugin.adapters.steps import StepMetadataBuilder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_V2 = "v2 (VLLM_USE_V2_MODEL_RUNNER=1): on a CPU the v1 runner does not spread keys over ranks"


class SharedKeysFacts:
    """What vLLM wants to know of a layer whose keys ranks share; mixed into a layer."""

    supports_dcp = True
    can_return_lse_for_decode = True
    supports_mtp_with_cp_non_trivial_interleave_size = True


class SharedKeysMetadataBuilder(StepMetadataBuilder):
    """Translates a step for a builder that wants to know this rank's share of the keys."""

    def builder_arguments(self) -> Mapping[str, Any]:
        """The share."""
        return {"shard": shard_of(self.vllm_config)}


def shard_of(vllm_config: VllmConfig) -> ContextShard:
    """This rank's share of the keys."""
    from vllm.distributed import get_dcp_group

    parallel = vllm_config.parallel_config
    size = parallel.decode_context_parallel_size
    rank = get_dcp_group().rank_in_group if size > 1 else 0
    return ContextShard(rank=rank, size=size, interleave=parallel.cp_kv_cache_interleave_size)


def runner_refusals(backend: str, request: BackendRequest) -> list[Refusal]:
    """What a layer whose keys ranks share says of the engine's model runner."""
    shares_keys = request.context_parallel_size > request.prefill_context_parallel_size
    if not shares_keys or request.runner == "v2":
        return []
    return [refusal(backend, "runner", request.runner, _V2)]


def padded(part: PartialAttention, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [rows, N, D] and natural-log lse [rows, N] of a part; rows of padding are 0 and -inf."""
    missing = rows - part.lse.shape[0]
    out = torch.nn.functional.pad(part.out, (0, 0, 0, 0, 0, missing))
    return out, torch.nn.functional.pad(part.lse, (0, 0, 0, missing), value=float("-inf"))
