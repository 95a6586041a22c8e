"""The FRACTAL_NZ layout: a matrix (M, N) stored as (N/n, M/16, 16, n), zero-filled at the ends.

n is 16 elements, or 32 bytes for 8-bit types. Leading dimensions stay in front.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROWS = 16


def from_nz(stored: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The matrix of ``shape`` (..., M, N) that ``stored`` (..., N1, M1, 16, n) holds, as a copy."""
    *lead, pieces, blocks, rows, columns = stored.shape
    plain = stored.movedim(-4, -2).reshape(*lead, blocks * rows, pieces * columns)
    return plain[..., : shape[-2], : shape[-1]].reshape(tuple(shape)).clone()


def to_nz(plain: torch.Tensor, stored_shape: Sequence[int]) -> torch.Tensor:
    """``plain`` (..., M, N) in the layout of ``stored_shape`` (..., N1, M1, 16, n)."""
    *lead, pieces, blocks, rows, columns = stored_shape
    grid = plain.new_zeros((*lead, blocks * rows, pieces * columns))
    grid[..., : plain.shape[-2], : plain.shape[-1]] = plain
    return grid.view(*lead, blocks, rows, pieces, columns).movedim(-2, -4)


def nz_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Storage shape of a matrix (..., M, N) in FRACTAL_NZ."""
    columns = 32 if dtype.itemsize == 1 else 16
    *lead, m, n = shape
    return (*lead, -(-n // columns), -(-m // _ROWS), _ROWS, columns)
