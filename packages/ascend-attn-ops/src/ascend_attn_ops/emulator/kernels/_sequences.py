"""Rows and keys of each request in the layouts that the attention operators share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Place = tuple[int, ...]


def lengths_of(cumulative: Sequence[int]) -> list[int]:
    """Lengths from prefix sums without a leading 0."""
    return [end - start for start, end in zip([0, *cumulative], cumulative, strict=False)]


def as_list(lengths: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    """Lengths as Python integers."""
    if lengths is None:
        return None
    return [int(value) for value in lengths]


def request_rows(
    shape: torch.Size, layout: str, lengths: torch.Tensor | Sequence[int] | None
) -> list[list[Place]]:
    """Index of every query row, per request.

    Args:
        shape: TND (T, N, D) or BSND (B, S, N, D).
        layout: ``TND`` or ``BSND``.
        lengths: TND: prefix sums; BSND: lengths or None for S.
    """
    given = as_list(lengths)
    if layout == "TND":
        assert given is not None  # noqa: S101 - the contract demands it
        starts = [0, *given]
        return [[(row,) for row in range(a, b)] for a, b in zip(starts, given, strict=False)]
    counts = given or [shape[1]] * shape[0]
    return [[(request, row) for row in range(count)] for request, count in enumerate(counts)]


def gather_keys(
    keys: torch.Tensor,
    layout: str,
    lengths: torch.Tensor | Sequence[int] | None,
    block_table: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Keys (L, N, D) of each request.

    Args:
        keys: BSND (B, S, N, D), TND (T, N, D) or PA_BSND (blocks, block_size, N, D).
        layout: ``BSND``, ``TND`` or ``PA_BSND``.
        lengths: TND: prefix sums; otherwise lengths, None for S in BSND.
        block_table: (B, M) for PA_BSND.
    """
    given = as_list(lengths)
    if layout == "TND":
        assert given is not None  # noqa: S101 - the contract demands it
        return list(keys[: given[-1]].split(lengths_of(given)))
    if layout == "BSND":
        counts = given or [keys.shape[1]] * keys.shape[0]
        return [keys[request, :count] for request, count in enumerate(counts)]
    assert given is not None  # noqa: S101 - the contract demands it
    assert block_table is not None  # noqa: S101 - the contract demands it
    size = keys.shape[1]
    return [
        keys[block_table[request, : -(-count // size)].long()].flatten(0, 1)[:count]
        for request, count in enumerate(given)
    ]
