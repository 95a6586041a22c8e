"""Host arrays (torch CPU tensors, numpy arrays) and NPU tensors described for aclCreateTensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from ...arguments import dtype_name
from .errors import ArrayError


@attrs.frozen
class Layout:
    """Shape, strides and dtype of a tensor.

    Attributes:
        dtype: torch's name, e.g. ``bfloat16``.
        shape: Sizes.
        strides: Strides in elements.
        itemsize: Bytes per element.
        storage: Sizes of the FRACTAL_NZ storage; None for plain memory (ND), as strides say.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    storage: tuple[int, ...] | None = None

    def __str__(self) -> str:
        form = f"strides {list(self.strides)}" if self.storage is None else "format FRACTAL_NZ"
        return f"{self.dtype}{list(self.shape)} with {form}"

    @property
    def elements(self) -> int:
        """Elements from the first one to the last one, gaps of the strides included."""
        if self.storage is not None:
            return math.prod(self.storage)
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        return self.elements * self.itemsize


@attrs.frozen(eq=False)
class HostArray:
    """Memory of the host with a layout; ``owner`` keeps it alive."""

    layout: Layout
    address: int
    owner: Any


def contiguous(dtype: str, shape: Sequence[int]) -> Layout:
    """Layout without gaps.

    Raises:
        ArrayError: torch has no such dtype.
    """
    steps = [1]
    for size in reversed(shape[1:]):
        steps.insert(0, steps[0] * size)
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ArrayError(f"dtype: found {dtype!r}; allowed: torch's names, such as 'bfloat16'")
    return Layout(dtype, tuple(shape), tuple(steps[: len(shape)]), found.itemsize)


def layout_of(tensor: torch.Tensor, *, fractal_nz: bool = False) -> Layout:
    """Layout of a torch tensor on any device.

    Args:
        tensor: The tensor.
        fractal_nz: Its data are stored in FRACTAL_NZ.

    Raises:
        ArrayError: A tensor of fewer than two dimensions has no such storage.
    """
    name, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    storage = _nz_sizes(shape, tensor.itemsize) if fractal_nz else None
    return Layout(name, shape, tuple(tensor.stride()), tensor.itemsize, storage)


def _nz_sizes(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """A matrix (..., M, N) in tiles: (..., N / n, M / 16, 16, n), n = 32 for 8-bit types, else 16.

    Source: CANN document "data formats", FRACTAL_NZ.
    """
    if len(shape) < 2:
        raise ArrayError(f"FRACTAL_NZ: found {len(shape)} dimensions; allowed: at least 2")
    *lead, rows, columns = shape
    width = 32 if itemsize == 1 else 16
    return (*lead, -(-columns // width), -(-rows // 16), 16, width)


def fractal_nz_array(tensor: torch.Tensor) -> HostArray:
    """A copy of a torch CPU tensor (..., M, N) in FRACTAL_NZ; what the tiles add is 0.

    Raises:
        ArrayError: It is not on the CPU, or has fewer than two dimensions.
    """
    layout = attrs.evolve(
        host_array(tensor).layout, storage=layout_of(tensor, fractal_nz=True).storage
    )
    assert layout.storage is not None  # noqa: S101 - asked for
    *_, wide, high, tall, width = layout.storage
    grown = (0, wide * width - tensor.shape[-1], 0, high * tall - tensor.shape[-2])
    tiles = torch.nn.functional.pad(tensor, grown).unflatten(-1, (wide, width))
    tiles = tiles.unflatten(-3, (high, tall)).movedim(-2, -4).contiguous()
    return HostArray(layout, tiles.data_ptr(), tiles)


def plain_tensor(tiles: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of ``shape`` (..., M, N) whose FRACTAL_NZ storage is ``tiles``."""
    rows = tiles.movedim(-4, -2).flatten(-2).flatten(-3, -2)
    return rows[..., : shape[-2], : shape[-1]].contiguous()


def host_array(value: Any) -> HostArray:
    """A torch CPU tensor or numpy array, without a copy where its strides allow that.

    Raises:
        ArrayError: It is something else.
    """
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ArrayError(f"a host array: found a tensor on {value.device}; allowed: cpu")
        return HostArray(layout_of(value), value.data_ptr(), value)
    if isinstance(value, np.ndarray):
        return _from_numpy(value)
    raise ArrayError(f"a tensor: found {type(value).__name__}; allowed: torch.Tensor, numpy array")


def _from_numpy(array: np.ndarray[Any, Any]) -> HostArray:
    size = array.itemsize
    if any(step < 0 or step % size for step in array.strides):
        array = np.ascontiguousarray(array)  # CANN counts strides in elements, from 0
    strides = tuple(step // size for step in array.strides)
    layout = Layout(array.dtype.name, array.shape, strides, size)
    return HostArray(layout, array.ctypes.data, array)
