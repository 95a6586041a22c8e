"""All rows at once."""

from __future__ import annotations

import torch

from .arguments import GatherPaKvCacheArguments as Args


def run_cpu(a: Args) -> None:
    """Fill ``key`` and ``value``; indices are 64-bit whatever the dtype of the tables."""
    lengths = a.lengths()
    ends = lengths.cumsum(0)
    total = min(int(lengths.sum()), a.key.shape[0])
    request = torch.repeat_interleave(lengths)[:total]
    token = torch.arange(total) - (ends - lengths)[request]
    blocks, known = _blocks(a, request, a.first_columns()[request] + token // a.block_size)
    offset = token % a.block_size
    whole = bool(known.all())
    for rows, cache in ((a.key, a.key_cache), (a.value, a.value_cache)):
        if cache.shape[0] == 0:
            rows[:total] = 0
            continue
        found = cache[blocks, offset]
        rows[:total] = found if whole else found.masked_fill(~known[:, None, None], 0)


def _blocks(
    a: Args, request: torch.Tensor, column: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block id per row (0 where there is none) and whether there is one."""
    width = a.block_tables.shape[1]
    inside = (column >= 0) & (column < width)
    if width == 0:
        return torch.zeros_like(column), inside
    blocks = a.block_tables[request, column.clamp(0, width - 1)].long()
    known = inside & (blocks >= 0) & (blocks < a.key_cache.shape[0])
    return blocks.masked_fill(~known, 0), known
