"""aclnnSparseFlashAttention: dense float64 attention under a mask made from the indices."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..contracts import contract_check
from ..dispatch import kernel
from ._sequences import gather_keys, request_rows

_CHECK = contract_check("sparse_flash_attention")


@kernel("aclnnSparseFlashAttention", "aclnnSparseFlashAttentionV2", check=_CHECK, workspace=4096)
def sparse_flash_attention(a: Any) -> tuple[torch.Tensor | None, ...]:
    """Shapes in :class:`ascend_attn_ops.SparseFlashAttentionArguments`."""
    query = torch.cat([a.query, a.query_rope], -1).double()
    keys = gather_keys(a.key, a.layout_kv, a.actual_seq_lengths_kv, a.block_table)
    ropes = gather_keys(a.key_rope, a.layout_kv, a.actual_seq_lengths_kv, a.block_table)
    out = torch.zeros(a.query.shape, dtype=torch.float64)
    heads = a.query.shape[-2]
    top = torch.zeros((*a.query.shape[:-2], heads), dtype=torch.float64)
    total = torch.zeros_like(top)
    sinks = getattr(a, "sinks", None)
    rows = request_rows(a.query.shape, a.layout_query, a.actual_seq_lengths_query)
    for latent, rope, places in zip(keys, ropes, rows, strict=True):
        key = torch.cat([latent, rope], -1)[:, 0].double()
        for position, place in enumerate(places):
            limit = len(key) if a.sparse_mode == 0 else len(key) - len(places) + position + 1
            weights = _selection(a.sparse_indices[place][0], a.sparse_block_size, limit, len(key))
            scores = query[place] @ key.T * a.scale_value
            _attend(scores, weights, key[:, :512], sinks, (out[place], top[place], total[place]))
    return out, _statistic(a, top), _statistic(a, total)


def _selection(indices: torch.Tensor, block: int, limit: int, length: int) -> torch.Tensor:
    """How often each key is selected: float64 (length,)."""
    weights = torch.zeros(length, dtype=torch.float64)
    count = min(len(indices), max(0, math.ceil(limit / block)))
    for index in indices[:count].tolist():
        if index == -1:
            break
        start = index * block
        if 0 <= start < limit:
            weights[start : min(start + block, limit)] += 1
    return weights


def _attend(
    scores: torch.Tensor,
    weights: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
    targets: tuple[torch.Tensor, ...],
) -> None:
    """Weighted softmax of scores (N, L) over the selected keys, and its maximum and sum."""
    out, top, total = targets
    chosen = scores.masked_fill(weights == 0, -math.inf)
    if sinks is not None and bool((weights != 0).any()):
        chosen = torch.cat([chosen, sinks.double()[:, None]], -1)
        weights = torch.cat([weights, torch.ones(1, dtype=torch.float64)])
    peak = chosen.amax(-1)
    if bool(torch.isinf(peak).all()):
        return  # a row that sees nothing stays 0
    exponentials = (chosen - peak[:, None]).exp() * weights
    total.copy_(exponentials.sum(-1))
    top.copy_(peak)
    out.copy_(exponentials[:, : len(values)] @ values / total[:, None])


def _statistic(a: Any, values: torch.Tensor) -> torch.Tensor | None:
    """(B, S, N) or (T, N) as (B, 1, S, N) or (1, T, N), when it is asked for."""
    return values.unsqueeze(-3) if a.return_softmax_lse else None
