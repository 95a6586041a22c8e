"""Which blocks the tokens of a step chose keys from."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..paged_step import PagedStep
from .pool import OffloadCapacityError


def selected_blocks(entries: torch.Tensor, step: PagedStep) -> torch.Tensor:
    """Block of every chosen key.

    Args:
        entries: ``[T, k]`` int32 positions in the request's own keys, -1 for none.
        step: Whose kernel blocks are meant.

    Returns:
        ``[T, k]`` int64 in host memory; -1 where there is no entry or it is no key of the request.
    """
    if step.is_empty:
        return torch.full(entries.shape, -1, dtype=torch.int64)
    entries = entries.cpu().long()
    ends, lens, table = (x.cpu().long() for x in (step.query_ends, step.seq_lens, step.block_table))
    request = torch.searchsorted(ends, torch.arange(len(entries)), right=True)
    owned = request < len(ends)
    request = request.clamp(max=len(ends) - 1)
    legal = (entries >= 0) & (entries < lens[request][:, None]) & owned[:, None]
    column = torch.where(legal, entries, 0) // step.kernel_block_size
    return torch.where(legal, table[request[:, None], column], -1)


def pieces_within(blocks: torch.Tensor, capacity: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut a step into ranges of tokens that need at most ``capacity`` blocks each.

    Args:
        blocks: ``[T, k]`` of :func:`selected_blocks`.
        capacity: Blocks that may be needed together.

    Yields:
        First token, token after the last, and the ``[n]`` int64 blocks that they need, in order.

    Raises:
        OffloadCapacityError: One token alone needs more.
    """
    ranges = [(0, len(blocks))] if len(blocks) else []
    while ranges:
        first, last = ranges.pop()
        part = blocks[first:last]
        needed = part[part >= 0].unique()
        if len(needed) <= capacity:
            yield first, last, needed
        elif last - first == 1:
            raise OffloadCapacityError(len(needed), capacity)
        else:
            middle = (first + last) // 2
            ranges += [(middle, last), (first, middle)]
