"""Decode over large blocks of a paged cache, which are read where they lie.

A row of a request sees all its keys: two products per block, into its scores and into its output,
one soon after the other so that a block comes from memory once. Which blocks those are is decided
once and serves all layers of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import attrs
import torch

from .call import Call
from .problem import Span, block_caches, full_mask

LARGE_BLOCK = 1 << 14  # elements of a block that is worth a kernel call of its own
View = tuple[tuple[int, int, int], tuple[int, int, int], int]
"""Sizes, strides, and how far behind the cache's first element it begins."""


def legible_caches(c: Call) -> tuple[torch.Tensor, ...]:
    """Caches in which a row that is alone in its request can read all keys where they lie.

    Returns:
        [num_blocks, KN, block_size, size] of keys, rotary parts and values; none where such a row
        sees less or the caches must be rearranged.
    """
    if c.block_table is None or c.query.dtype not in (torch.float32, torch.float64):
        return ()
    if c.pse is not None or c.effective_mode not in (0, 3) or full_mask(c) is not None:
        return ()
    if c.block_table.stride(1) != 1:
        return ()
    caches = block_caches(c, c.first_key, c.key_rope, c.first_value)
    plain = len(caches[0]) and all(t.dim() == 4 and t.stride(3) == 1 for t in caches)
    return caches if plain else ()


def absent_block(request: int, column: int, found: int, blocks: int) -> IndexError:
    """The error of a block that is not in the cache; it would become an address."""
    place = f"block_table[{request}, {column}]"
    return IndexError(f"{place}: found {found}, allowed: 0 to {blocks - 1}")


def joined(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Caches as one where the rows of the second continue those of the first in memory."""
    if len(parts) != 2:
        return parts
    left, right = parts
    strides, start, size = left.stride(), left.storage_offset(), left.shape[3]
    follows = right.storage_offset() == start + size and right.stride() == strides
    if not follows or right.data_ptr() != left.data_ptr() + size * left.itemsize:
        return parts  # with these offsets the addresses differ where the memories do
    return (left.as_strided((*left.shape[:3], size + right.shape[3]), strides, start),)


class Piece(NamedTuple):
    """Keys of one row in one block.

    Attributes:
        first: Number of the first key.
        tokens: How many there are.
        keys: [KN, size, count] of each part of the keys.
        values: [KN, count, VD].
    """

    first: int
    tokens: int
    keys: tuple[View, ...]
    values: View


class Row(NamedTuple):
    """One query row, the only one of its request.

    Attributes:
        number: Which row.
        length: Its keys.
        pieces: Where they are, in their order.
    """

    number: int
    length: int
    pieces: tuple[Piece, ...]


@attrs.frozen(eq=False)
class DecodePlan:
    """Where the products of a decode step read; it fits all tensors of the same strides.

    Attributes:
        rows: The rows.
        heads: N and KN.
        parts: Sizes of the parts of a key.
        value_size: VD.
        scale: Multiplies the scores.
    """

    rows: tuple[Row, ...]
    heads: tuple[int, int]
    parts: tuple[int, ...]
    value_size: int
    scale: float

    @classmethod
    def of(
        cls, c: Call, spans: Sequence[Span], keys: Sequence[torch.Tensor], value: torch.Tensor
    ) -> DecodePlan:
        """The plan of requests of one row each, which have keys.

        Args:
            c: The call.
            spans: The requests.
            keys: Caches [num_blocks, KN, block_size, size] whose rows side by side are the keys.
            value: Cache of the values.

        Raises:
            IndexError: A block that a request reads is not in the cache.
        """
        assert c.block_table is not None  # noqa: S101 - its caches are legible
        table, blocks = c.block_table.tolist(), value.shape[0]
        views = [_Views.of(cache, turned=True) for cache in keys]
        views.append(_Views.of(value, turned=False))
        rows = tuple(
            Row(span.start, span.kv_len,
                _pieces(span, table[span.request], blocks, c.block_size, views))
            for span in spans
        )  # fmt: skip
        sizes = tuple(cache.shape[3] for cache in keys)
        return cls(rows, (c.heads, c.kv_heads), sizes, value.shape[3], c.scale)

    def attend(
        self,
        query: torch.Tensor,
        keys: Sequence[torch.Tensor],
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Attention of the plan's rows.

        Args:
            query: [rows, N, D] of all requests.
            keys: Caches as the plan was made for.
            value: Likewise.
            out: [rows, N, VD], filled where the plan has rows.
            lse: [rows, N] likewise, or None.
        """
        heads, kv_heads = self.heads
        shape = (-1, kv_heads, heads // kv_heads)
        grouped = query.reshape(*shape, query.shape[2])
        parts = (grouped,) if len(keys) == 1 else grouped.split_with_sizes(self.parts, -1)
        queries = [part.unbind(0) for part in parts]
        outs = out.view(*shape, self.value_size).unbind(0)
        starts = [int(cache.storage_offset()) for cache in (*keys, value)]
        for row in self.rows:
            own = [part[row.number] for part in queries]
            scores = self._scores(row, own, keys, starts)
            weights = torch.softmax(scores, -1)
            for piece in row.pieces:
                whole = piece.tokens == row.length
                weight = weights if whole else weights.narrow(2, piece.first, piece.tokens)
                sizes, strides, offset = piece.values
                block = value.as_strided(sizes, strides, starts[-1] + offset)
                outs[row.number].baddbmm_(weight, block, beta=1 if piece.first else 0)
            if lse is not None:
                lse[row.number] = torch.logsumexp(scores, -1).view(heads)

    def _scores(
        self,
        row: Row,
        query: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
        starts: Sequence[int],
    ) -> torch.Tensor:
        """[KN, group, length] scaled scores of a row."""
        scores = query[0].new_empty((*query[0].shape[:2], row.length))
        for piece in row.pieces:
            whole = piece.tokens == row.length
            place = scores if whole else scores.narrow(2, piece.first, piece.tokens)
            for number, (sizes, strides, offset) in enumerate(piece.keys):
                block = keys[number].as_strided(sizes, strides, starts[number] + offset)
                place.baddbmm_(query[number], block, beta=1 if number else 0, alpha=self.scale)
        return scores


class _Views(NamedTuple):
    """Views of blocks of a cache: the first tokens of each."""

    heads: int
    size: int
    strides: tuple[int, int, int]
    block_step: int
    turned: bool

    @classmethod
    def of(cls, cache: torch.Tensor, *, turned: bool) -> _Views:
        """Views [KN, count, size], or [KN, size, count] when turned."""
        block_step, head, token, element = cache.stride()
        strides = (head, element, token) if turned else (head, token, element)
        return cls(cache.shape[1], cache.shape[3], strides, block_step, turned)

    def view(self, block: int, count: int) -> View:
        """Of one block."""
        rest = (self.size, count) if self.turned else (count, self.size)
        return (self.heads, *rest), self.strides, block * self.block_step


def _pieces(
    span: Span, ids: Sequence[int], blocks: int, block_size: int, views: Sequence[_Views]
) -> tuple[Piece, ...]:
    pieces = []
    for column, first in enumerate(range(0, span.kv_len, block_size)):
        block, count = ids[column], min(block_size, span.kv_len - first)
        if not 0 <= block < blocks:
            raise absent_block(span.request, column, block, blocks)
        *keys, values = [view.view(block, count) for view in views]
        pieces.append(Piece(first, count, tuple(keys), values))
    return tuple(pieces)
