"""What the operators over paged caches find: the shape of a cache in its two forms, slots, rows.

A cache is plain, (num_blocks, block_size, heads, size), or in the NZ form, (num_blocks, pieces,
block_size, inner), in which a piece holds ``inner`` elements of each token: so many as fill the
``nz_bytes`` of the contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ...contract import Finding
from .findings import first_element


class Rows(NamedTuple):
    """What one token of a cache is made of; ``name`` is the cache's parameter."""

    name: str
    heads: int
    size: int


def nz_pieces(heads: int, size: int, element_size: int, nz_bytes: int) -> tuple[int, int]:
    """(pieces, inner) of a token with heads x size elements of ``element_size`` bytes."""
    inner = nz_bytes // element_size
    return -(-heads * size // inner), inner


def neither_form(a: Any, rows: Iterable[Rows], element_size: int, nz_bytes: int) -> Finding | None:
    """The first cache whose shape is not the one that the form of both (``a.is_nd``) leads to."""
    blocks, plain_size, nz_size = a.key_cache.shape[:3]
    for name, heads, size in rows:
        pieces, inner = nz_pieces(heads, size, element_size, nz_bytes)
        plain, nz = (blocks, plain_size, heads, size), (blocks, pieces, nz_size, inner)
        shape = tuple(getattr(a, name).shape)
        if shape != (plain if a.is_nd else nz):
            both = f"{list(plain)} or NZ {list(nz)}, both caches in one form"
            return Finding(str(list(shape)), both, name)
    return None


def nz_only(a: Any) -> str | None:
    """The caches, where they are plain and only NZ is supported."""
    return f"plain caches {list(a.key_cache.shape)}" if a.is_nd else None


def plain_only(a: Any) -> str | None:
    """The caches, where they are not plain and only that is supported."""
    return None if a.is_nd else f"{list(a.key_cache.shape)}"


def unequal_rows(key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Shapes of key and value when they differ before the last axis."""
    if key.shape[:-1] == value.shape[:-1]:
        return None
    return f"key {list(key.shape)}, value {list(value.shape)}"


def slot_beyond(name: str, slots: torch.Tensor, end: int) -> str | None:
    """The first slot at or after ``end``."""
    found = first_element(name, slots, slots >= end)
    return found and f"{found} of {end} slots"


def slot_written_twice(slots: torch.Tensor) -> str | None:
    """The first slot that more than one row is for; negative ones are skipped by the operators."""
    values, counts = slots[slots >= 0].unique(return_counts=True)
    twice = values[counts > 1]
    return f"slot {int(twice[0])} {int(counts[counts > 1][0])} times" if twice.numel() else None
