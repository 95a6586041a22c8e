"""Layers whose keys ranks share (decode context parallel), as vLLM computes them.

vLLM gathers the query heads of all ranks, asks the layer for its part over the keys of this rank,
and merges the parts by their lse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ascend_attn_backends import ContextShard
from ascend_attn_ops import PartialAttention

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SharedKeysFacts:
    """What vLLM wants to know of a layer whose keys ranks share; mixed into a layer."""

    supports_dcp = True
    can_return_lse_for_decode = True
    supports_mtp_with_cp_non_trivial_interleave_size = True


def shard_of(vllm_config: VllmConfig) -> ContextShard:
    """This rank's share of the keys."""
    from vllm.distributed import get_dcp_group

    parallel = vllm_config.parallel_config
    size = parallel.decode_context_parallel_size
    rank = get_dcp_group().rank_in_group if size > 1 else 0
    return ContextShard(rank=rank, size=size, interleave=parallel.cp_kv_cache_interleave_size)


def padded(part: PartialAttention, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [rows, N, D] and natural-log lse [rows, N] of a part; rows of padding are 0 and -inf."""
    missing = rows - part.lse.shape[0]
    out = torch.nn.functional.pad(part.out, (0, 0, 0, 0, 0, missing))
    return out, torch.nn.functional.pad(part.lse, (0, 0, 0, missing), value=float("-inf"))
