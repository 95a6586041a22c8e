"""Requests and rows one at a time, for the reference providers of the sparse attention family."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from .sequences import Sequences


@attrs.frozen(eq=False)
class Row:
    """One real query row.

    Attributes:
        number: Its number among the flattened rows.
        request: Its request.
        limit: Number of keys that it may see.
    """

    number: int
    request: int
    limit: int


def real_rows(s: Sequences, sparse_mode: int) -> Iterator[Row]:
    """The rows of all requests in order, padding left out."""
    for request in range(s.batch):
        first, query_len = request_span(s.layout_query, s.query, s.query_lengths, request)
        _, kv_len = request_span(s.layout_kv, s.key, s.kv_lengths, request)
        for i in range(query_len):
            limit = kv_len - query_len + i + 1 if sparse_mode == 3 else kv_len
            yield Row(first + i, request, limit)


def request_span(
    layout: str, rows: torch.Tensor, lengths: torch.Tensor | None, request: int
) -> tuple[int, int]:
    """First row and number of rows of a request; for a paged layout the first row is 0."""
    if layout == "BSND":
        length = rows.shape[1] if lengths is None else int(lengths[request])
        return request * rows.shape[1], length
    assert lengths is not None  # noqa: S101 - the contract guarantees it
    end = int(lengths[request])
    if layout == "TND":
        start = int(lengths[request - 1]) if request else 0
        return start, end - start
    return 0, end


def request_keys(s: Sequences, store: torch.Tensor, request: int) -> torch.Tensor:
    """Rows [Lkv, D] of a key-like tensor that belong to a request."""
    start, length = request_span(s.layout_kv, s.key, s.kv_lengths, request)
    if s.block_table is not None:
        blocks = s.block_table[request, : -(-length // s.block_size)].long()
        return store[blocks].flatten(0, 2)[:length]
    return store[request, :length, 0] if store.dim() == 4 else store[start : start + length, 0]
