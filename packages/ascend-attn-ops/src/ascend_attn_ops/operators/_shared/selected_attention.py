"""Fast attention of each query row over its own selected keys, for the host providers.

The work is proportional to the number of selected keys: only they are read. Rows are taken in
tiles, so that neither the gathered keys nor the scores grow with T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch

from .running_softmax import RunningSoftmax
from .sequences import KeyRows, QueryRows, visible_keys

TILE_ELEMENTS = 1 << 23  # elements of the gathered keys of a tile: 32 MiB in float32

Gather = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Keys [t, c, Dk] and values [t, c, Dv], float32 or float64, for requests [t, 1] and positions
[t, c]."""


@attrs.frozen(eq=False)
class SelectedAttention:
    """One call, flattened to rows.

    Attributes:
        query: (T, N, Dk); tiles are computed in float32 (float64 for float64).
        indices: (T, K) int32 block indices; see the operator's record.
        rows: Requests of the rows.
        keys: Places of the keys.
        gather: Reads keys and values.
        value_size: Dv.
        scale: Multiplies the scores.
        block: Tokens per index (sparse_block_size).
        causal: Whether rows see keys up to their own position only.
        sinks: (N,) float32 or None.
    """

    query: torch.Tensor
    indices: torch.Tensor
    rows: QueryRows
    keys: KeyRows
    gather: Gather
    value_size: int
    scale: float
    block: int
    causal: bool
    sinks: torch.Tensor | None = None


@attrs.frozen(eq=False)
class SelectedResult:
    """Outputs of a call.

    Attributes:
        out: (T, N, Dv) in the dtype of the problem's query.
        maximum: (T, N) float32; 0 for rows without keys (the sink where there is one).
        total: (T, N) float32; 0 for rows without keys (1 where there is a sink).
    """

    out: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor


def attend(p: SelectedAttention) -> SelectedResult:
    """Attention of all rows."""
    seen = visible_keys(p.rows, p.keys, causal=p.causal)
    entries = readable_entries(p.indices, seen, p.block)
    result = _blank(p, seen)
    for chosen in _row_tiles(p, entries):
        state = _attend_tile(p, chosen, seen[chosen], entries[chosen])
        result.out[chosen] = state.out().to(p.query.dtype)
        maximum = state.maximum.masked_fill(state.total == 0, 0.0)
        result.maximum[chosen] = maximum[..., 0].float()
        result.total[chosen] = state.total[..., 0].float()
    return result


def readable_entries(indices: torch.Tensor, seen: torch.Tensor, block: int) -> torch.Tensor:
    """(T,) number of entries that a row reads: up to its first -1, at most ceil(seen / block)."""
    ended = indices == -1
    first = torch.where(ended.any(-1), ended.int().argmax(-1), indices.shape[-1])
    return torch.minimum(first, (seen + block - 1) // block)


def _blank(p: SelectedAttention, seen: torch.Tensor) -> SelectedResult:
    tokens, heads = p.query.shape[:2]
    out = p.query.new_zeros(tokens, heads, p.value_size)
    maximum = torch.zeros(tokens, heads)
    total = torch.zeros(tokens, heads)
    if p.sinks is not None:
        some = (seen > 0)[:, None]
        maximum = torch.where(some, p.sinks.float(), maximum)
        total = torch.where(some, 1.0, total)
    return SelectedResult(out, maximum, total)


def _row_tiles(p: SelectedAttention, entries: torch.Tensor) -> Iterator[torch.Tensor]:
    """Row numbers [t] of each tile; rows that read nothing are in none."""
    active = entries.nonzero()[:, 0]
    if active.numel():
        per_row = int(entries.max()) * p.block * p.query.shape[-1]
        yield from active.split(max(TILE_ELEMENTS // per_row, 1))


def _attend_tile(
    p: SelectedAttention, chosen: torch.Tensor, seen: torch.Tensor, entries: torch.Tensor
) -> RunningSoftmax:
    wide = torch.promote_types(p.query.dtype, torch.float32)
    query = p.query[chosen].to(wide).mul_(p.scale)
    request = p.rows.request[chosen][:, None]
    state = RunningSoftmax.start(query, p.value_size, p.sinks)
    most = int(entries.max())
    step = max(TILE_ELEMENTS // (len(chosen) * p.block * query.shape[-1]), 1)
    for first in range(0, most, step):
        columns = torch.arange(first, min(first + step, most))
        position, legal = _positions(p, chosen, columns, seen, entries)
        key, value = p.gather(request, position)
        scores = query @ key.transpose(1, 2)
        scores.masked_fill_(~legal[:, None], float("-inf"))
        state.add(scores, value)
    return state


def _positions(
    p: SelectedAttention,
    chosen: torch.Tensor,
    columns: torch.Tensor,
    seen: torch.Tensor,
    entries: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key positions [t, c * block] of some columns of the index rows, and which of them count."""
    index = p.indices[chosen, columns[0] : columns[-1] + 1].long()
    legal = (index >= 0) & (columns < entries[:, None])
    position = index * p.block
    if p.block > 1:
        position = (position[..., None] + torch.arange(p.block)).flatten(1)
        legal = legal.repeat_interleave(p.block, 1)
    legal = legal & (position < seen[:, None])
    return position.where(legal, position.new_zeros(())), legal
