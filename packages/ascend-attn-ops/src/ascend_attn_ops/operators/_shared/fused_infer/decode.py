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
View = tuple[tuple[int, int, int], tuple[int, int, int], int]
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


@attrs.frozen(eq=False)
class DecodePlan:
    """Where the products of a group read and write; it fits all tensors of the same strides.

    Attributes:
        group: The group of R rows.
        heads: N and KN.
        key_views: For each part of the keys: per piece, sizes and strides of its keys [KN, size,
            count] and how far behind the cache's first element they begin.
        value_views: Likewise for the values [KN, count, VD].
        scale: Multiplies the scores.
    """

    group: DecodeGroup
    heads: tuple[int, int]
    key_views: tuple[tuple[View, ...], ...]
    value_views: tuple[View, ...]
    scale: float

    @classmethod
    def of(
        cls, group: DecodeGroup, c: Call, keys: Sequence[torch.Tensor], value: torch.Tensor
    ) -> DecodePlan:
        """The plan for caches [num_blocks, KN, block_size, size] like these."""
        key_views = tuple(_views(group, cache, turned=True) for cache in keys)
        return cls(
            group, (c.heads, c.kv_heads), key_views, _views(group, value, turned=False), c.scale
        )

    def attend(
        self, query: torch.Tensor, keys: Sequence[torch.Tensor], value: torch.Tensor, *, lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the group's rows.

        Args:
            query: [R, N, D] of these rows; D is the sum of the sizes of the keys' parts.
            keys: Caches whose rows side by side are the keys.
            value: Cache of the values.
            lse: Whether the lse is wanted.

        Returns:
            Outputs [R, N, VD], and lse [R, N] or None.
        """
        (heads, kv_heads), rows = self.heads, query.shape[0]
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, -1)
        scores = self._scores(grouped, keys)
        weights = torch.softmax(scores, -1)
        size = self.value_views[0][0][2]
        out = query.new_empty((rows, kv_heads, heads // kv_heads, size))
        sources, places, start = weights.unbind(0), out.unbind(0), value.storage_offset()
        for piece, (sizes, strides, offset) in zip(
            self.group.pieces, self.value_views, strict=True
        ):
            row, _, first, _ = piece
            places[row].baddbmm_(
                self._of_piece(sources, piece),
                value.as_strided(sizes, strides, start + offset),
                beta=1 if first else 0,
            )
        found = torch.logsumexp(scores, -1).view(rows, heads) if lse else None
        return out.view(rows, heads, size), found

    def _scores(self, query: torch.Tensor, keys: Sequence[torch.Tensor]) -> torch.Tensor:
        """[R, KN, group, width] scaled scores; -inf beyond a row's keys."""
        group, shape = self.group, (*query.shape[:3], self.group.width)
        scores = query.new_full(shape, float("-inf")) if group.padded else query.new_empty(shape)
        rows = scores.unbind(0)
        sizes = [views[0][0][1] for views in self.key_views]
        parts = (query,) if len(keys) == 1 else query.split(sizes, -1)
        for number, (part, cache, views) in enumerate(
            zip(parts, keys, self.key_views, strict=True)
        ):
            own, start = part.unbind(0), cache.storage_offset()
            for piece, (size, strides, offset) in zip(group.pieces, views, strict=True):
                self._of_piece(rows, piece).baddbmm_(
                    own[piece[0]],
                    cache.as_strided(size, strides, start + offset),
                    beta=1 if number else 0,
                    alpha=self.scale,
                )
        return scores

    def _of_piece(self, rows: Sequence[torch.Tensor], piece: Piece) -> torch.Tensor:
        """Scores or weights [KN, group, count] of a piece in those of its row."""
        row, _, first, count = piece
        return rows[row] if count == self.group.width else rows[row].narrow(2, first, count)


def _views(group: DecodeGroup, cache: torch.Tensor, *, turned: bool) -> tuple[View, ...]:
    """Keys [KN, size, count], turned, or values [KN, count, size] of each piece."""
    _, heads, _, size = cache.shape
    block_step, head_step, token_step, element_step = cache.stride()
    views = []
    for _, block, _, count in group.pieces:
        if turned:
            sizes, strides = (heads, size, count), (head_step, element_step, token_step)
        else:
            sizes, strides = (heads, count, size), (head_step, token_step, element_step)
        views.append((sizes, strides, block * block_step))
    return tuple(views)


def joined(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Caches as one where the rows of the second continue those of the first in memory."""
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
