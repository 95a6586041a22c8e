"""Decode over large blocks of a paged cache, which are read where they lie.

Every request has one query row and sees all its keys: two products per block, one into the scores
and one into the output. Which blocks those are is decided once and serves all layers of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import attrs
import torch

from .call import Call
from .problem import Span, block_caches, full_mask

LARGE_BLOCK = 1 << 14  # elements of a block that is worth a kernel call of its own
Piece = tuple[int, int, int, int]
"""Number of the row in its group, block id, number of its first key, and how many keys it has."""


@attrs.frozen(eq=False, slots=False)
class DecodeGroup:
    """Rows with similar key counts; their scores are one tensor.

    Attributes:
        rows: [R] query row of each member.
        pieces: Blocks of the members, in the order of their keys.
        width: Most keys of a member.
    """

    rows: torch.Tensor
    pieces: tuple[Piece, ...]
    width: int

    @cached_property
    def padded(self) -> bool:
        """Whether a member has fewer keys than ``width``."""
        return sum(count for *_, count in self.pieces) < len(self.rows) * self.width


def reads_in_place(c: Call) -> bool:
    """Whether one row of a request may be computed here."""
    if not c.paged or c.query.dtype not in (torch.float32, torch.float64):
        return False
    if c.pse is not None or c.effective_mode not in (0, 3) or full_mask(c) is not None:
        return False
    caches = block_caches(c, c.first_key, c.key_rope, c.first_value)
    if any(cache.dim() == 5 or cache.stride(3) != 1 for cache in caches):
        return False
    return len(caches[0]) > 0 and caches[0][0].numel() >= LARGE_BLOCK


def decode_groups(c: Call, spans: Sequence[Span]) -> list[DecodeGroup]:
    """Requests of one row each, which have keys, in groups of similar key counts.

    Raises:
        IndexError: A block that a request reads is not in the cache.
    """
    table = _blocks(c, spans)
    groups: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        groups[span.kv_len.bit_length()].append(span)
    return [_group(members, table, c.block_size) for members in groups.values()]


def _blocks(c: Call, spans: Sequence[Span]) -> list[list[int]]:
    """Block ids by request. They become addresses, so each that is read must be a block."""
    assert c.block_table is not None  # noqa: S101 - reads_in_place said so
    table: list[list[int]] = c.block_table.tolist()
    blocks = len(c.first_key)
    for span in spans:
        for column, block in enumerate(table[span.request][: -(-span.kv_len // c.block_size)]):
            if not 0 <= block < blocks:
                place = f"block_table[{span.request}, {column}]"
                raise IndexError(f"{place}: found {block}, allowed: 0 to {blocks - 1}")
    return table


def _group(members: list[Span], table: list[list[int]], size: int) -> DecodeGroup:
    pieces = tuple(
        (number, table[span.request][first // size], first, min(size, span.kv_len - first))
        for number, span in enumerate(members)
        for first in range(0, span.kv_len, size)
    )
    rows = torch.tensor([span.start for span in members])
    return DecodeGroup(rows, pieces, max(span.kv_len for span in members))


def attend_group(
    group: DecodeGroup,
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    value: torch.Tensor,
    scale: float,
    *,
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of the rows of a group.

    Args:
        group: The group of R rows.
        query: [R, N, D] of these rows; D is the sum of the sizes of the keys' parts.
        keys: Caches [num_blocks, KN, block_size, size], whose rows side by side are the keys.
        value: Cache [num_blocks, KN, block_size, VD].
        scale: Multiplies the scores.
        lse: Whether the lse is wanted.

    Returns:
        Outputs [R, N, VD], and lse [R, N] or None.
    """
    count, heads, _ = query.shape
    kv_heads = value.shape[1]
    grouped = query.reshape(count, kv_heads, heads // kv_heads, -1)
    scores = _scores(group, grouped, _joined(keys), scale)
    weights = torch.softmax(scores, -1)
    out = torch.empty((*grouped.shape[:3], value.shape[3]), dtype=query.dtype)
    _weigh(group, weights, value, out)
    found = torch.logsumexp(scores, -1).view(count, heads) if lse else None
    return out.view(count, heads, -1), found


def _scores(
    group: DecodeGroup, query: torch.Tensor, keys: Sequence[torch.Tensor], scale: float
) -> torch.Tensor:
    """[R, KN, group, width] scaled scores; -inf beyond a row's keys."""
    shape, width = (*query.shape[:3], group.width), group.width
    scores = query.new_full(shape, float("-inf")) if group.padded else query.new_empty(shape)
    rows = scores.unbind(0)
    parts = query.split([cache.shape[3] for cache in keys], -1) if len(keys) > 1 else (query,)
    for part, (queries, cache) in enumerate(zip(parts, keys, strict=True)):
        _, heads, _, size = cache.shape
        (block_step, *steps), start = cache.stride(), cache.storage_offset()
        steps, own = [steps[0], steps[2], steps[1]], queries.unbind(0)
        for row, block, first, count in group.pieces:
            place = rows[row] if count == width else rows[row].narrow(2, first, count)
            turned = cache.as_strided((heads, size, count), steps, start + block * block_step)
            place.baddbmm_(own[row], turned, beta=min(part, 1), alpha=scale)
    return scores


def _weigh(
    group: DecodeGroup, weights: torch.Tensor, value: torch.Tensor, out: torch.Tensor
) -> None:
    """Fill out [R, KN, group, VD] from weights [R, KN, group, width]."""
    _, heads, _, size = value.shape
    (block_step, *steps), start = value.stride(), value.storage_offset()
    sources, places, width = weights.unbind(0), out.unbind(0), group.width
    for row, block, first, count in group.pieces:
        own = sources[row] if count == width else sources[row].narrow(2, first, count)
        rows = value.as_strided((heads, count, size), steps, start + block * block_step)
        places[row].baddbmm_(own, rows, beta=min(first, 1))


def _joined(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The parts as one cache where each of their rows continues the other's in memory."""
    if len(parts) != 2:
        return parts
    left, right = parts
    ends = left.data_ptr() + left.shape[3] * left.element_size()
    if left.stride() != right.stride() or ends != right.data_ptr():
        return parts
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return parts
    sizes = (*left.shape[:3], left.shape[3] + right.shape[3])
    return (left.as_strided(sizes, left.stride(), left.storage_offset()),)
