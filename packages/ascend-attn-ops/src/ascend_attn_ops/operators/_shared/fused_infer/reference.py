"""The formula, request by request, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

import torch

from .call import Call
from .problem import Problem, Span, Store, problem


def run_reference(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request over its own keys; see the argument record."""
    p = problem(call)
    wide = torch.promote_types(call.query.dtype, torch.float32)
    out = torch.zeros(len(p.query), call.heads, p.value_size, dtype=wide)
    lse = torch.full((len(p.query), call.heads), float("inf"), dtype=torch.float32)
    for span in p.spans:
        rows = slice(span.start, span.start + span.q_len)
        out[rows], lse[rows] = _attend(p, span)
    return p.outputs(out, lse)


def _attend(p: Problem, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """out [Lq, N, VD] and lse [Lq, N] of one request."""
    call = p.call
    wide = torch.promote_types(call.query.dtype, torch.float32)
    query = p.query[span.start : span.start + span.q_len].to(wide)
    key = torch.cat([_own(store, span) for store in p.keys], -1).to(wide)
    value = _own(p.values, span).to(wide)
    group = call.heads // call.kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * call.scale
    if call.pse is not None:
        shift = call.pse[span.request if len(call.pse) > 1 else 0]
        scores = scores + shift[:, : span.q_len, : span.kv_len].to(wide)
    scores = scores.masked_fill(~visible(p, span), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    out = torch.einsum("hqk,khd->qhd", weights, value)
    if call.sink is not None:  # the sink only enlarges the denominator
        out = out * torch.sigmoid(lse - call.sink.to(wide)[:, None]).T[..., None]
    return out, lse.masked_fill(lse.isneginf(), float("inf")).T.float()


def _own(store: Store, span: Span) -> torch.Tensor:
    """Keys or values [Lkv, KN, D] of one request."""
    positions = torch.arange(span.kv_len)[None]
    return store.tokens(torch.tensor([span.request]), positions)[0]


def visible(p: Problem, span: Span) -> torch.Tensor:
    """bool [Lq, Lkv]: which key j a query row i may see, by ``sparse_mode``."""
    call, mode = p.call, p.call.effective_mode
    row = torch.arange(span.q_len)[:, None]
    column = torch.arange(span.kv_len)[None]
    end = row + (span.kv_len - span.q_len)
    if mode == 2:
        return column <= row
    if mode == 3:
        return column <= end
    if mode == 4:
        return (column >= end - call.pre) & (column <= end + call.nxt)
    if p.full_mask is None:
        return torch.ones(span.q_len, span.kv_len, dtype=torch.bool)
    own = p.full_mask[span.request if len(p.full_mask) > 1 else 0]
    seen = ~own[: span.q_len, : span.kv_len]
    if mode == 0:
        seen = seen & (column >= row - call.pre) & (column <= row + call.nxt)
    return seen
