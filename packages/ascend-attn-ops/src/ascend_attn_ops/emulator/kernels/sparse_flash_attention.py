"""Sparse attention over selected keys: float64, with a weight for each key instead of a gather.

A key that a row's indices name n times has the weight n; the softmax is taken over all keys of the
request with these weights. The providers gather the selected keys; here nothing is gathered.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..contracts import contract_check
from ..dispatch import kernel
from ._sequences import gather_keys, request_rows

_LATENT, _TILE = 512, 128


@kernel(
    "aclnnSparseFlashAttention",
    "aclnnSparseFlashAttentionV2",
    check=contract_check("sparse_flash_attention"),
    workspace=4096,
)
def sparse_flash_attention(a: Any) -> tuple[torch.Tensor | None, ...]:
    """Shapes in :class:`ascend_attn_ops.SparseFlashAttentionArguments`."""
    query = torch.cat([a.query, a.query_rope], -1)
    latents = gather_keys(a.key, a.layout_kv, a.actual_seq_lengths_kv, a.block_table)
    ropes = gather_keys(a.key_rope, a.layout_kv, a.actual_seq_lengths_kv, a.block_table)
    keys = [torch.cat(parts, -1)[:, 0] for parts in zip(latents, ropes, strict=True)]
    out, top, total = _attend_all(a, query, keys, getattr(a, "sinks", None))
    if not a.return_softmax_lse:
        return out, None, None
    return out, top.unsqueeze(-3), total.unsqueeze(-3)  # (B, 1, S, N) or (1, T, N)


@kernel(
    "aclnnKvQuantSparseFlashAttention",
    check=contract_check("kv_quant_sparse_flash_attention"),
    workspace=4096,
)
def kv_quant_sparse_flash_attention(a: Any) -> torch.Tensor:
    """The same over packed rows: 512 8-bit values, 64 rotary values, 4 scales for 128 values."""
    packed = gather_keys(a.key, a.layout_kv, a.actual_seq_lengths_kv, a.block_table)
    keys = [_unpacked(rows[:, 0], a.query.dtype) for rows in packed]
    return _attend_all(a, a.query, keys, None)[0]


def _unpacked(rows: torch.Tensor, rope_dtype: torch.dtype) -> torch.Tensor:
    """(L, 656) packed -> (L, 576); a dequantised latent has the precision of the query."""
    rope = rows[:, _LATENT : _LATENT + 128].contiguous().view(torch.uint8).view(rope_dtype)
    scales = rows[:, _LATENT + 128 :].contiguous().view(torch.uint8).view(torch.float32)
    values = rows[:, :_LATENT].double().view(-1, _LATENT // _TILE, _TILE)
    latent = (values * scales.double()[..., None]).flatten(1).to(rope_dtype)
    return torch.cat([latent, rope], -1)


def _attend_all(
    a: Any, query: torch.Tensor, keys: list[torch.Tensor], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out (..., N, 512), maximum and sum (..., N) in the query's layout; unseen rows are 0."""
    lead = query.shape[:-1]
    out = torch.zeros((*lead, _LATENT), dtype=torch.float64)
    top, total = torch.zeros((2, *lead), dtype=torch.float64)
    rows = request_rows(query.shape, a.layout_query, a.actual_seq_lengths_query)
    for key, places in zip(keys, rows, strict=True):
        key = key.double()
        for position, place in enumerate(places):
            limit = len(key) if a.sparse_mode == 0 else len(key) - len(places) + position + 1
            weights = _selection(a.sparse_indices[place][0], a.sparse_block_size, limit, len(key))
            if not weights.any():
                if sinks is not None and limit > 0:
                    top[place], total[place] = sinks.double(), 1.0
                continue
            scores = query[place].double() @ key.T * a.scale_value
            out[place], top[place], total[place] = _softmax(scores, weights, key, sinks)
    return out, top, total


def _selection(indices: torch.Tensor, block: int, limit: int, length: int) -> torch.Tensor:
    """How often each key is selected: (length,)."""
    weights = torch.zeros(length, dtype=torch.float64)
    count = min(len(indices), max(0, math.ceil(limit / block)))
    for index in indices[:count].tolist():
        if index == -1:
            break
        if 0 <= index * block < limit:
            weights[index * block : min((index + 1) * block, limit)] += 1
    return weights


def _softmax(
    scores: torch.Tensor, weights: torch.Tensor, key: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out (N, 512), maximum (N,) and sum (N,) of scores (N, L)."""
    top = scores.masked_fill(weights == 0, -math.inf).amax(-1)
    if sinks is not None:
        top = torch.maximum(top, sinks.double())
    parts = (scores - top[:, None]).exp() * weights
    total = parts.sum(-1)
    if sinks is not None:
        total = total + (sinks.double() - top).exp()
    return parts @ key[:, :_LATENT] / total[:, None], top, total
