"""Host arrays (torch CPU tensors, numpy arrays) and NPU tensors described for aclCreateTensor."""

from __future__ import annotations

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
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} with strides {list(self.strides)}"

    @property
    def elements(self) -> int:
        """Elements from the first one to the last one, gaps of the strides included."""
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


def layout_of(tensor: torch.Tensor) -> Layout:
    """Layout of a torch tensor on any device."""
    name = dtype_name(tensor.dtype)
    return Layout(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.itemsize)


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
