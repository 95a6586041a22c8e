"""Where the queries and keys of each request lie."""

from __future__ import annotations

from itertools import pairwise

import attrs
import torch

from .arguments import PAGED
from .arguments import SparseFlashMlaArguments as Args

Span = tuple[int, int]


def query_spans(a: Args) -> list[Span]:
    """First row and number of real rows of each request, among the flattened rows."""
    return _spans(a.layout_q, a.q, a.cu_seqlens_q, a.seqused_q, a.batch)


def _spans(
    layout: str,
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    used: torch.Tensor | None,
    batch: int,
) -> list[Span]:
    if layout == "TND":
        assert ends is not None  # noqa: S101 - the contract guarantees it
        spans = [(start, end - start) for start, end in pairwise(ends.tolist())]
    else:
        spans = [(request * rows.shape[1], rows.shape[1]) for request in range(batch)]
    if used is None:
        return spans
    return [(start, length) for (start, _), length in zip(spans, used.tolist(), strict=True)]


@attrs.frozen(eq=False)
class KeySide:
    """The original or the compressed keys of a call.

    Attributes:
        layout: BSND, TND or PA_BBND.
        store: (B, S, 1, D), (T, 1, D) or (num_blocks, block_size, 1, D).
        spans: First row (0 when paged) and number of keys of each request.
        table: Block ids of a paged store.
    """

    layout: str
    store: torch.Tensor
    spans: list[Span]
    table: torch.Tensor | None

    def length(self, request: int) -> int:
        """Keys of a request."""
        return self.spans[request][1]

    def read(self, request: int, first: int, end: int) -> torch.Tensor:
        """(end - first, D) keys of a request by position; only the blocks they lie in are read."""
        start = self.spans[request][0]
        if self.table is None:
            return self.store.flatten(0, -3)[start + first : start + end, 0]
        size = self.store.shape[1]
        column = first // size
        blocks = self.table[request, column : -(-end // size)].long()
        return self.store[blocks].flatten(0, 2)[first - column * size : end - column * size]


def ori_side(a: Args) -> KeySide:
    """The original keys."""
    return _side(a, a.ori_kv, a.cu_seqlens_ori_kv, a.seqused_ori_kv, a.ori_block_table)


def cmp_side(a: Args) -> KeySide:
    """The compressed keys; the call has them."""
    return _side(a, a.cmp_kv, a.cu_seqlens_cmp_kv, a.seqused_cmp_kv, a.cmp_block_table)


def _side(
    a: Args,
    store: torch.Tensor | None,
    ends: torch.Tensor | None,
    used: torch.Tensor | None,
    table: torch.Tensor | None,
) -> KeySide:
    assert store is not None  # noqa: S101 - the contract guarantees it
    spans = _spans(a.layout_kv, store, ends, used, a.batch)
    if a.layout_kv == PAGED:
        spans = [(0, length) for _, length in spans]
    return KeySide(a.layout_kv, store, spans, table)
