"""The formula, request by request, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

import torch

from .arguments import FusedInferAttentionScoreArguments as Args


def run_reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request over its own keys; see the argument record."""
    out = torch.zeros_like(a.query)
    lse = torch.full((*a.query.shape[:2], 1), float("inf"), dtype=torch.float32)
    start = 0
    for request, end in enumerate(a.actual_seq_lengths or ()):
        if end > start:
            out[start:end], lse[start:end, :, 0] = _attend(a, request, start, end)
        start = end
    return out, lse if a.softmax_lse_flag else lse.new_empty(0)


def _attend(a: Args, request: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(a.query.dtype, torch.float32)
    query = a.query[start:end].to(wide)
    key = _request_rows(a, a.key, request).to(wide)
    value = _request_rows(a, a.value, request).to(wide)
    group = a.num_heads // a.kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * a.scale
    scores = scores.masked_fill(~visible(a, query.shape[0], key.shape[0]), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    out = torch.einsum("hqk,khd->qhd", weights, value)
    return out.to(a.query.dtype), lse.masked_fill(lse.isneginf(), float("inf")).T.float()


def visible(a: Args, query_len: int, kv_len: int) -> torch.Tensor:
    """bool [Lq, Lkv]: which key j a query row i may see, by ``sparse_mode``."""
    row = torch.arange(query_len)[:, None] + (kv_len - query_len)
    column = torch.arange(kv_len)[None]
    if a.sparse_mode == 0:
        return torch.ones(query_len, kv_len, dtype=torch.bool)
    if a.sparse_mode == 3:
        return column <= row
    return (column >= row - a.pre_tokens) & (column <= row + a.next_tokens)


def _request_rows(a: Args, rows: torch.Tensor, request: int) -> torch.Tensor:
    """Keys or values [Lkv, KN, D] of one request."""
    assert a.actual_seq_lengths_kv is not None  # noqa: S101 - the contract guarantees it
    length = a.actual_seq_lengths_kv[request]
    if a.block_table is None:
        start = a.actual_seq_lengths_kv[request - 1] if request else 0
        return rows[start:length]
    blocks = a.block_table[request, : -(-length // a.block_size)].long()
    cache = rows[blocks]
    if cache.dim() == 4:
        cache = cache.transpose(1, 2)
    return cache.reshape(-1, a.kv_heads, a.query.shape[2])[:length]
