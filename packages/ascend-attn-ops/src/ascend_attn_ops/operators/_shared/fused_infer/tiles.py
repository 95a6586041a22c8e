"""Attention with any mask or shift: key tiles with a running softmax."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..running_softmax import RunningSoftmax
from .pieces import Bucket, cleared
from .problem import Problem

_TILE_ELEMENTS = 1 << 20  # elements of one tile of keys: 4 MiB in float32
_SCORES = 1 << 24  # scores of one tile: 64 MiB in float32


def attend_tiles(p: Problem, b: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [R, N, n, VD] and lse [R, N, n]; -inf for rows without keys."""
    call = p.call
    wide = torch.promote_types(p.query.dtype, torch.float32)
    group = call.heads // call.kv_heads
    shape = (b.size, call.kv_heads, group, b.count)
    query = p.query[b.rows].to(wide).transpose(1, 2) * call.scale
    query = query.reshape(b.size, call.kv_heads, group * b.count, -1)
    state = RunningSoftmax.start(query, p.value_size, None)
    for first, last in _ranges(p, b):
        key = torch.cat([store.gather(b.requests, first, last) for store in p.keys], -1)
        scores = query @ key.to(wide).transpose(-1, -2)
        view = scores.view(*shape, last - first)
        if call.pse is not None:
            view += _shift(p, b, first, last).to(wide).view(view.shape)
        view.masked_fill_(_hidden(p, b, first, last)[:, None, None], float("-inf"))
        value = p.values.gather(b.requests, first, last).to(wide)
        state.add(scores, cleared(value, torch.arange(first, last) >= b.kv_lens[:, None]))
    heads = (b.size, call.heads, b.count)
    lse = (state.maximum + state.total.log()).reshape(heads)
    return state.out().reshape(*heads, p.value_size), lse


def _ranges(p: Problem, b: Bucket) -> Iterator[tuple[int, int]]:
    """Ranges of key positions, in whole blocks, that some row may see."""
    call, unit = p.call, p.values.unit
    after = {2: b.offsets, 3: b.ends, 4: b.ends + call.nxt}
    low, high = 0, int(b.kv_lens.max())
    if call.effective_mode in after:
        high = min(high, int(after[call.effective_mode].max()) + b.count)
    if call.effective_mode == 4:
        low = max(int(b.ends.min()) - call.pre, 0) // unit * unit
    per_token = b.size * call.kv_heads * max(p.query.shape[-1], p.value_size)
    per_score = b.size * call.heads * b.count
    step = max(min(_TILE_ELEMENTS // per_token, _SCORES // per_score) // unit, 1) * unit
    for first in range(low, high, step):
        yield first, min(first + step, -(-high // unit) * unit)


def _shift(p: Problem, b: Bucket, first: int, last: int) -> torch.Tensor:
    """pse_shift [R, N, n, tile]; zero beyond its end, where keys are hidden anyway."""
    pse = p.call.pse
    assert pse is not None  # noqa: S101 - the caller branched on it
    columns = torch.arange(first, last).clamp_(max=pse.shape[3] - 1)
    own = pse[b.requests if len(pse) > 1 else b.requests * 0]
    rows = b.offsets[:, None] + torch.arange(b.count)
    return own[torch.arange(b.size)[:, None], :, rows][..., columns].transpose(1, 2)


def _hidden(p: Problem, b: Bucket, first: int, last: int) -> torch.Tensor:
    """bool [R, n or 1, tile]: keys that a row must not see."""
    call, mode = p.call, p.call.effective_mode
    column = torch.arange(first, last)
    hidden = (column >= b.kv_lens[:, None])[:, None]
    row = (b.offsets[:, None] + torch.arange(b.count))[..., None]
    end = (b.ends[:, None] + torch.arange(b.count))[..., None]
    if mode == 2:
        return hidden | (column > row)
    if mode == 3:
        return hidden | (column > end)
    if mode == 4:
        return hidden | (column > end + call.nxt) | (column < end - call.pre)
    if p.full_mask is None:
        return hidden
    mask = p.full_mask
    own = b.requests[:, None] if len(mask) > 1 else b.requests[:, None] * 0
    hidden = hidden | mask[own, row[..., 0]][..., column.clamp(max=mask.shape[2] - 1)]
    if mode == 0:
        hidden = hidden | (column > row + call.nxt) | (column < row - call.pre)
    return hidden
