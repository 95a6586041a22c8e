"""Attention of few query rows that reads the cache blocks where they are, without gathering."""

from __future__ import annotations

import attrs
import torch

from .arguments import FlashAttnArguments as Args
from .chunks import Chunk, hidden_keys, visible_range
from .rows import with_sinks

_LARGEST_SCORES = 1 << 24  # elements of one request's scores: 64 MiB in float32
_SMALLEST_BLOCK = 32  # slots below which the products of a block are too small to pay
_DTYPES = (torch.float32, torch.float64)  # half precision products are faster in the fused kernel


def reads_in_place(a: Args, chunk: Chunk) -> bool:
    """Whether this way is possible and pays."""
    rows = a.heads * chunk.rows.shape[1]
    return (
        a.layout_kv in ("PA_BBND", "PA_BNBD")
        and a.q.dtype in _DTYPES
        and a.block_size >= _SMALLEST_BLOCK
        and rows * int(chunk.kv_lens.max()) <= _LARGEST_SCORES
    )


def attend_in_place(
    a: Args, chunk: Chunk, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (R*Lq, Nq, D) and lse (R*Lq, Nq) of one chunk; ``query`` is (R*Lq, Nq, D)."""
    count, query_len = chunk.rows.shape
    group, size = a.heads // a.kv_heads, a.head_dim
    query = query.view(count, query_len, a.kv_heads, group, size).permute(0, 2, 3, 1, 4)
    out = torch.zeros(query.shape, dtype=query.dtype)
    lse = torch.full(query.shape[:-1], float("-inf"), dtype=query.dtype)
    for index in range(count):
        _attend_request(a, chunk.only(index), query[index], out[index], lse[index])
    out, lse = with_sinks(out, lse, a.sinks if a.has_sinks else None)
    out = out.permute(0, 3, 1, 2, 4).reshape(-1, a.heads, size)
    return out, lse.permute(0, 3, 1, 2).reshape(-1, a.heads)


@attrs.frozen(eq=False)
class _Block:
    """Part of a cache block: keys (KN, D, slots) and values (KN, slots, D), as views."""

    key: torch.Tensor
    value: torch.Tensor


def _blocks(a: Args, chunk: Chunk, first: int, last: int) -> list[_Block]:
    """The blocks of one request at positions first .. last; first starts a block."""
    assert a.block_table is not None  # noqa: S101 - the contract guarantees it
    heads_first = a.layout_kv == "PA_BNBD"
    keys = a.k.transpose(2, 3) if heads_first else a.k.permute(0, 2, 3, 1)
    values = a.v if heads_first else a.v.transpose(1, 2)
    size = a.block_size
    ids = a.block_table[int(chunk.requests), first // size : -(-last // size)].tolist()
    ends = [min(last - start, size) for start in range(first, last, size)]
    return [
        _Block(keys[block, :, :, :end], values[block, :, :end])
        for block, end in zip(ids, ends, strict=True)
    ]


def _attend_request(
    a: Args, chunk: Chunk, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write out (KN, G, Lq, D) and lse (KN, G, Lq) of one request."""
    rows = slice(0, chunk.rows.shape[1])
    low, high = visible_range(a, chunk, rows, 0, int(chunk.kv_lens))
    if low >= high:
        return
    low -= low % a.block_size
    blocks = _blocks(a, chunk, low, high)
    folded = query.flatten(1, 2) * a.softmax_scale
    scores = torch.cat([torch.bmm(folded, block.key) for block in blocks], -1)
    hidden = hidden_keys(a, chunk, rows, low, high)
    if hidden is not None:
        scores.view(*query.shape[:3], -1).masked_fill_(hidden, float("-inf"))
    total = torch.logsumexp(scores, -1)
    weights = scores.sub_(total.masked_fill(total.isneginf(), 0.0)[..., None]).exp_()
    sums = torch.zeros_like(folded)
    done = 0
    for block in blocks:
        slots = block.value.shape[1]
        sums.baddbmm_(weights[..., done : done + slots], block.value)
        done += slots
    out.copy_(sums.view(query.shape))
    lse.copy_(total.view(lse.shape))
