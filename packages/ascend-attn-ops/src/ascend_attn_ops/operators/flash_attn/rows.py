"""Queries, keys and outputs of any layout as rows of tokens, for the host providers."""

from __future__ import annotations

import torch

from .._shared.flash_attn import size_of
from .arguments import FlashAttnArguments as Args
from .lengths import Side, query_side


def query_rows(a: Args) -> tuple[torch.Tensor, Side]:
    """Queries as (rows, Nq, D) and where each request's rows are."""
    side = query_side(a)
    if a.layout_q == "TND":
        return a.q, side
    q = a.q if a.layout_q == "BSND" else a.q.transpose(1, 2)
    batch, room = q.shape[:2]
    start = torch.arange(batch) * room
    return q.reshape(batch * room, *q.shape[2:]), Side(start, side.room, side.length)


def outputs(a: Args, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator's outputs from out (rows, Nq, D) and lse (rows, Nq)."""
    if not a.return_softmax_lse:
        lse = lse.new_empty(0)
    if a.layout_q == "TND":
        return out, lse.T.contiguous() if a.return_softmax_lse else lse
    room = size_of(a.q, a.layout_q, "S")
    out = out.view(-1, room, *out.shape[1:])
    if a.layout_out == "BNSD":
        out = out.transpose(1, 2).contiguous()
    if a.return_softmax_lse:
        lse = lse.view(-1, room, lse.shape[1]).transpose(1, 2).contiguous()
    return out, lse


def request_keys(
    a: Args, rows: torch.Tensor, request: int, start: int, length: int
) -> torch.Tensor:
    """Keys or values (length, Nkv, D) of one request; ``start`` is its first row in TND."""
    if a.block_table is None:
        return _whole_keys(a, rows, request, start)[:length]
    blocks = a.block_table[request, : -(-length // a.block_size)].long()
    cache = rows[blocks]
    if a.layout_kv == "PA_NZ":
        cache = cache.permute(0, 3, 1, 2, 4)
    elif a.layout_kv == "PA_BNBD":
        cache = cache.transpose(1, 2)
    return cache.reshape(-1, a.kv_heads, a.head_dim)[:length]


def _whole_keys(a: Args, rows: torch.Tensor, request: int, start: int) -> torch.Tensor:
    if a.layout_kv == "TND":
        return rows[start:]
    return rows[request] if a.layout_kv == "BSND" else rows[request].transpose(0, 1)


def with_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse with the sinks in the denominator; rows without keys become 0 and +inf.

    Args:
        out: (R, KN, G, Lq, D), 0 in rows without keys.
        lse: (R, KN, G, Lq), -inf in rows without keys.
        sinks: (KN * G,) or None.
    """
    empty = lse.isneginf()
    if sinks is not None:
        scores = sinks.to(lse.dtype).view(lse.shape[1], lse.shape[2], 1)
        out = out * torch.sigmoid(lse - scores)[..., None]
        lse = torch.logaddexp(lse, scores)
    return out, lse.masked_fill(empty, float("inf"))
