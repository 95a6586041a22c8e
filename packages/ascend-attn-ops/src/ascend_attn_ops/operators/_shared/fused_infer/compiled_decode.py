"""Decode by one compiled loop, for steps of which torch's calls would take longer than the work."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs
import torch

from ..compiled import Kernel, compiled_loop
from .call import Call
from .decode import absent_block
from .problem import Span

MOST_PRODUCTS = 1 << 24  # beyond, torch's threads win
PLAN = (
    "rows", "heads", "kv_heads", "size", "rope", "value_size",
    "query_row", "query_head", "query_rope_row", "query_rope_head",
    "key_block", "key_head", "key_token",
    "key_rope_block", "key_rope_head", "key_rope_token",
    "value_block", "value_head", "value_token",
    "block_size", "table_row", "room", "with_lse", "cache_blocks",
)  # fmt: skip
"""Numbers that begin a plan, in the order in which the loop reads them; steps are in elements.

Behind them come three for each row: its own number, that of its request, and its length.
"""

_BLOCK_SIZE, _TABLE_ROW, _ROOM, _BLOCKS = map(
    PLAN.index, ("block_size", "table_row", "room", "cache_blocks")
)


def attends(c: Call, spans: Sequence[Span]) -> bool:
    """Whether rows of these requests, one each, are computed here; their caches are legible."""
    if c.query.dtype != torch.float32 or _loop() is None or c.query.stride(-1) != 1:
        return False
    if c.query_rope is not None and c.query_rope.stride(-1) != 1:
        return False
    return few_products(c.heads, c.value_size, [span.kv_len for span in spans])


def few_products(heads: int, size: int, lengths: Sequence[int]) -> bool:
    """Whether one thread is fast enough for rows with so many keys."""
    return 2 * heads * size * sum(lengths) <= MOST_PRODUCTS or torch.get_num_threads() == 1


@attrs.frozen(eq=False)
class CompiledPlan:
    """A decode step for the loop; it fits all tensors of the same shapes and strides.

    One thread at a time may use it.

    Attributes:
        requests: Number of each row's request.
        table: [B, columns] int32 blocks of the requests.
        value_size: VD.
    """

    requests: Sequence[int]
    table: torch.Tensor
    value_size: int
    _numbers: array[int]
    _scale: array[float]
    _scratch: torch.Tensor

    @classmethod
    def of(
        cls,
        c: Call,
        spans: Sequence[Span],
        queries: tuple[torch.Tensor, torch.Tensor | None],
        caches: Sequence[torch.Tensor],
        *,
        lse: bool,
    ) -> CompiledPlan:
        """The plan of requests of one row each, which have keys.

        Args:
            c: The call.
            spans: The requests.
            queries: [rows, N, D], and [rows, N, rope] or None; elements of a row are adjacent.
            caches: [num_blocks, KN, block_size, size] of the keys, of their rotary parts where
                there are any, and of the values.
            lse: Whether the lse is wanted.
        """
        assert c.block_table is not None  # noqa: S101 - its caches are legible
        query, rope = queries
        key, *ropes, value = caches
        turned = (0, 0, 0) if rope is None else (*rope.stride()[:2], rope.shape[2])
        key_rope = ropes[0].stride()[:3] if ropes else (0, 0, 0)
        room = _room(max(span.kv_len for span in spans), c.block_size)
        numbers = array("q", [
            len(spans), c.heads, c.kv_heads, query.shape[2], turned[2], value.shape[3],
            *query.stride()[:2], *turned[:2], *key.stride()[:3], *key_rope, *value.stride()[:3],
            c.block_size, c.block_table.stride(0), room, lse, value.shape[0],
        ])  # fmt: skip
        for span in spans:
            numbers.extend((span.start, span.request, span.kv_len))
        requests = [span.request for span in spans]
        scale, scratch = array("f", [c.scale]), torch.empty(c.heads // c.kv_heads * room)
        return cls(requests, c.block_table, value.shape[3], numbers, scale, scratch)

    def renewed(self, lengths: Sequence[int], table: torch.Tensor) -> CompiledPlan | None:
        """The plan of a further step in which the same requests have one row each.

        Args:
            lengths: Keys of each request, those of the rows among them.
            table: Their blocks.

        Returns:
            None where the step must be judged anew.
        """
        numbers, rows, known = self._numbers[:], len(self.requests), self.table
        size, capacity = numbers[_BLOCK_SIZE], table.shape[1] * numbers[_BLOCK_SIZE]
        alike = len(table) == len(known) and table.dtype == known.dtype and table.stride(1) == 1
        fit = len(lengths) == rows and 0 < min(lengths) <= max(lengths) <= capacity
        if not (alike and fit and few_products(numbers[1], self.value_size, lengths)):
            return None
        room = _room(max(lengths), size)
        numbers[_ROOM], numbers[_TABLE_ROW] = room, table.stride(0)
        numbers[len(PLAN) + 2 :: 3] = array("q", [lengths[number] for number in self.requests])
        scratch = self._scratch
        if room != self._numbers[_ROOM]:
            scratch = torch.empty(numbers[1] // numbers[2] * room)
        return attrs.evolve(self, table=table, numbers=numbers, scratch=scratch)

    def attend(
        self,
        queries: tuple[torch.Tensor, torch.Tensor | None],
        keys: tuple[torch.Tensor, torch.Tensor | None],
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Attention of the plan's rows.

        Args:
            queries: As the plan was made for.
            keys: Cache of the keys as a call has it, and of their rotary parts or None.
            value: Cache of the values.
            out: [rows, N, VD] contiguous, filled where the plan has rows.
            lse: [rows, N] contiguous float32 likewise, or None where the plan has none.

        Raises:
            IndexError: A block that a request reads is not in the cache; nothing is computed.
        """
        attend, table = _loop(), self.table
        assert attend is not None  # noqa: S101 - `attends` said so
        (query, rope), (key, key_rope) = queries, keys
        wrong = attend(
            query.data_ptr(), 0 if rope is None else rope.data_ptr(),
            key.data_ptr(), 0 if key_rope is None else key_rope.data_ptr(),
            value.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
            self._scratch.data_ptr(), self._scale.buffer_info()[0],
            table.data_ptr(), self._numbers.buffer_info()[0],
        )  # fmt: skip
        if wrong >= 0:
            request, column = self.requests[wrong >> 32], wrong & 0xFFFFFFFF
            raise absent_block(request, column, int(table[request, column]), self._numbers[_BLOCKS])


def _room(length: int, block_size: int) -> int:
    """Keys of the blocks that hold so many."""
    return -(-length // block_size) * block_size


@compiled_loop
def _loop() -> Kernel:
    from .decode_kernel import ATTEND

    return ATTEND
