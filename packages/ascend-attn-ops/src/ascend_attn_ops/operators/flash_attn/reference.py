"""The formula, request by request, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

import torch

from .arguments import FlashAttnArguments as Args
from .lengths import kv_side
from .rows import outputs, query_rows, request_keys


def run_reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request over its own keys; see the argument record."""
    query, queries = query_rows(a)
    keys = kv_side(a)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = torch.full(query.shape[:2], float("inf"), dtype=torch.float32, device=query.device)
    places = zip(
        queries.start.tolist(), queries.length.tolist(), keys.start.tolist(), keys.length.tolist(),
        strict=True,
    )  # fmt: skip
    for request, (start, count, key_start, key_count) in enumerate(places):
        if count and key_count:
            key, value = (request_keys(a, t, request, key_start, key_count) for t in (a.k, a.v))
            rows = slice(start, start + count)
            out[rows], lse[rows] = _attend(a, query[rows], key, value)
    return outputs(a, out, lse)


def _attend(
    a: Args, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (Lq, Nq, D) and lse (Lq, Nq) of query (Lq, Nq, D) over key and value (Lkv, Nkv, D)."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = a.heads // a.kv_heads
    key, value = (t.to(wide).repeat_interleave(group, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->qhk", query.to(wide), key) * a.softmax_scale
    seen = visible(a, query.shape[0], key.shape[0]).to(query.device)[:, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    maximum = scores.amax(-1)
    empty = maximum.isneginf()  # no sink can save a row without keys
    if a.sinks is not None and a.has_sinks:
        maximum = torch.maximum(maximum, a.sinks.to(wide))
    maximum = maximum.masked_fill(empty, 0.0)
    weights = torch.exp(scores - maximum[..., None])
    total = weights.sum(-1)
    if a.sinks is not None and a.has_sinks:
        total = total + torch.exp(a.sinks.to(wide) - maximum)
    total = total.masked_fill(empty, 1.0)
    out = torch.einsum("qhk,khd->qhd", weights, value) / total[..., None]
    lse = (total.log() + maximum).masked_fill(empty, float("inf"))
    return out.to(query.dtype), lse.float()


def visible(a: Args, query_len: int, kv_len: int) -> torch.Tensor:
    """bool (Lq, Lkv): which key j a query row i may see, by ``mask_mode``."""
    row = torch.arange(query_len)[:, None] + (kv_len - query_len)
    column = torch.arange(kv_len)[None]
    if a.mask_mode == 0:
        return torch.ones(query_len, kv_len, dtype=torch.bool)
    if a.mask_mode == 3:
        return column <= row
    seen = torch.ones(query_len, kv_len, dtype=torch.bool)
    if a.win_left != -1:
        seen &= column >= row - a.win_left
    if a.win_right != -1:
        seen &= column <= row + a.win_right
    return seen
