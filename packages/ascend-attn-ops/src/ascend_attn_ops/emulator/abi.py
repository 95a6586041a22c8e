"""The handles of libopapi.so seen from Python: ctypes structures and zero-copy tensor views."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..aclnn_abi import VendorDtype, dtypes, formats, vendor_dtypes
from .errors import EmulatorError

NULL_POINTER, INVALID, INNER, NOT_EMULATED = 161001, 161002, 561000, 561103
FRACTAL_NZ = 29
_MAX_RANK = 16
_TENSOR, _SCALAR, _ARRAY = 1, 2, 3  # enum handle_kind of opapi.h


class AclnnError(Exception):
    """Refusal of an emulated operator.

    Attributes:
        code: What the first stage returns, e.g. 161002.
    """

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


class TensorHandle(ctypes.Structure):
    """aclTensor of opapi.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("storage_rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * _MAX_RANK),
        ("strides", ctypes.c_int64 * _MAX_RANK),
        ("storage_dims", ctypes.c_int64 * _MAX_RANK),
        ("offset", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )


class ScalarHandle(ctypes.Structure):
    """aclScalar of opapi.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("value", ctypes.c_ubyte * 16),
    )


class ArrayHandle(ctypes.Structure):
    """The array and list types of opapi.h."""

    _fields_ = (("size", ctypes.c_uint64), ("values", ctypes.c_void_p))


DTYPES: Mapping[int, torch.dtype] = {
    **{number: getattr(torch, name) for number, name in dtypes().items()},
    **{number: getattr(torch, kind.stored_as) for number, kind in vendor_dtypes().items()},
}


def check_layout(handle_size: Callable[[int], int]) -> None:
    """Compare the structures above with the library's.

    Raises:
        EmulatorError: They differ: the build belongs to another version of this package.
    """
    for kind, structure in (
        (_TENSOR, TensorHandle),
        (_SCALAR, ScalarHandle),
        (_ARRAY, ArrayHandle),
    ):
        found = handle_size(kind)
        if found != ctypes.sizeof(structure):
            raise EmulatorError(
                f"{structure.__name__}: {found} bytes in libopapi.so, {ctypes.sizeof(structure)} "
                "in Python; clear the emulator's cache"
            )


class Memory:
    """What views need to know of the runtime: where device memory is and what handles exist."""

    def __init__(self, runtime: ctypes.CDLL, opapi: ctypes.CDLL) -> None:
        self._kind = runtime.emulator_memory_kind
        self._kind.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
        self._handle_kind = opapi.emulator_handle_kind
        self._handle_kind.argtypes = [ctypes.c_void_p]

    def require_handle(self, pointer: int, name: str) -> None:
        """Raise unless the pointer is a live handle."""
        if not self._handle_kind(pointer):
            raise AclnnError(INVALID, f"{name}: {pointer:#x} is no live handle")

    def require_device(self, address: int, size: int, name: str) -> None:
        """Raise unless ``size`` bytes at ``address`` are device memory."""
        left = ctypes.c_size_t()
        if self._kind(address, ctypes.byref(left)) != 0:
            raise AclnnError(INVALID, f"{name}: its data at {address:#x} is not device memory")
        if left.value < size:
            raise AclnnError(
                INVALID, f"{name}: {size} bytes, but its allocation ends after {left.value}"
            )


def tensor_view(pointer: int, name: str, memory: Memory) -> torch.Tensor:
    """The tensor behind an aclTensor, without a copy; FRACTAL_NZ data as it is stored.

    Raises:
        AclnnError: No such handle, an unknown dtype, or not device memory.
    """
    memory.require_handle(pointer, name)
    handle = TensorHandle.from_address(pointer)
    dtype = DTYPES.get(handle.dtype)
    if dtype is None:
        raise AclnnError(INVALID, f"{name}: aclDataType {handle.dtype} has no torch dtype")
    shape, strides = _layout(handle)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    size = (sum((d - 1) * s for d, s in zip(shape, strides, strict=True)) + 1) * dtype.itemsize
    if not handle.data:
        raise AclnnError(NULL_POINTER, f"{name}: its data is null")
    address = handle.data + handle.offset * dtype.itemsize
    memory.require_device(address, size, name)
    raw = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
    return raw.view(dtype).as_strided(shape, strides)


def _layout(handle: TensorHandle) -> tuple[list[int], list[int]]:
    if handle.format != FRACTAL_NZ:
        return list(handle.dims[: handle.rank]), list(handle.strides[: handle.rank])
    shape = list(handle.storage_dims[: handle.storage_rank])
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    return shape, strides


def set_shape(pointer: int, shape: Sequence[int]) -> None:
    """Give a live aclTensor another shape, contiguous; ``aclGetViewShape`` then tells it."""
    handle = TensorHandle.from_address(pointer)
    handle.rank = len(shape)
    step = 1
    for axis in reversed(range(len(shape))):
        handle.dims[axis], handle.strides[axis] = shape[axis], step
        step *= shape[axis]


def vendor_dtype(pointer: int) -> VendorDtype | None:
    """The type of a live aclTensor when torch lacks it; its view then shows the bytes."""
    return vendor_dtypes().get(TensorHandle.from_address(pointer).dtype)


def format_name(pointer: int) -> str:
    """aclFormat of a live aclTensor by name."""
    number = TensorHandle.from_address(pointer).format
    return formats().get(number, str(number))


def scalar_value(pointer: int) -> Any:
    """Python number behind an aclScalar."""
    handle = ScalarHandle.from_address(pointer)
    raw = torch.frombuffer(bytearray(handle.value), dtype=torch.uint8)
    dtype = DTYPES[handle.dtype]
    return raw[: dtype.itemsize].view(dtype).item()


def array_values(pointer: int, kind: Any) -> list[Any]:
    """Members of an array or list; ``kind`` is the ctypes type of a member."""
    handle = ArrayHandle.from_address(pointer)
    if not handle.size:
        return []
    return list((kind * handle.size).from_address(handle.values))
