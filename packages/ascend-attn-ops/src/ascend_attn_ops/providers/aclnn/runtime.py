"""A device of CANN without torch_npu: initialisation, stream, memory, two-stage operator calls.

An aclnn operator is called in two stages (CANN document "two-stage interface")::

    aclnnXGetWorkspaceSize(arguments ..., &size, &executor)    checks, plans
    aclnnX(workspace, size, executor, stream)                  launches
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import Any

import attrs
import numpy as np
import torch

from ascend_hwprofile import profile_for

from ...aclnn_abi import Signature, signature
from ...operators._shared.formats import FRACTAL_NZ, storage_format
from . import libraries
from .arrays import (
    Layout,
    contiguous,
    fractal_nz_array,
    host_array,
    layout_of,
    plain_tensor,
)
from .counters import Counters
from .errors import ArrayError, ClosedError, ExecutorReusedError, ShortWorkspaceError
from .handles import Handles

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_HUGE_PAGES_FIRST = 0  # ACL_MEM_MALLOC_HUGE_FIRST
_ALREADY_INITIALISED = (0, 100002, 207015)


@attrs.define(eq=False)
class DeviceTensor:
    """A tensor in the memory of the device.

    Attributes:
        layout: Shape, strides and dtype.
        address: Device address of the first element; None for a tensor without elements.
    """

    layout: Layout
    address: int | None
    _runtime: Runtime | None = attrs.field(repr=False)

    def close(self) -> None:
        """Give the memory back; again is harmless."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None and self.address is not None:
            runtime._free(self.address)

    def __enter__(self) -> DeviceTensor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def copy_to(self, target: torch.Tensor) -> None:
        """Wait for the stream and write the data into a CPU tensor of the same layout.

        Only its elements are written: what lies between them may belong to others.

        Raises:
            ArrayError: The tensor has another layout, or is not on the CPU.
        """
        runtime, array = self._open(), host_array(target)
        if array.layout != self.layout:
            raise ArrayError(f"copy_to: found {array.layout}; allowed: {self.layout}")
        runtime.synchronise()
        if self.address is None:
            return
        if target.is_contiguous():
            runtime._copy(array.address, self.address, self.layout.bytes, _DEVICE_TO_HOST)
        else:
            target.copy_(self.torch())

    def torch(self) -> torch.Tensor:
        """Wait for the stream; the data as a CPU tensor of the same shape and strides."""
        runtime, layout = self._open(), self.layout
        runtime.synchronise()
        dtype = getattr(torch, layout.dtype)
        if layout.storage is None:
            found = torch.empty_strided(layout.shape, layout.strides, dtype=dtype)
        else:
            found = torch.empty(layout.storage, dtype=dtype)
        if self.address is not None:
            runtime._copy(found.data_ptr(), self.address, layout.bytes, _DEVICE_TO_HOST)
        return found if layout.storage is None else plain_tensor(found, layout.shape)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The data as a numpy array.

        Raises:
            TypeError: numpy has no such dtype (bfloat16); use :meth:`torch`.
        """
        found: np.ndarray[Any, Any] = self.torch().numpy()
        return found

    def _open(self) -> Runtime:
        if self._runtime is None:
            raise ClosedError(f"the device tensor {self.layout.dtype}{list(self.layout.shape)}")
        return self._runtime


class Runtime:
    """One device with one stream, through the C interface of CANN.

    Use it as a context manager; closing frees what is still held. Not for several threads at once:
    CANN's device belongs to a thread.

    Args:
        device: Number of the device.
        stream: Stream of someone else to launch on, e.g. torch_npu's; default: one of its own.

    Raises:
        ProviderUnavailableError: There is no CANN here.
        CannError: CANN refuses the device.
    """

    def __init__(self, device: int = 0, *, stream: int | None = None) -> None:
        self.cann = libraries.load()
        self.counters = Counters()
        self.device = device
        self._blocks: dict[int, int] = {}
        self._workspace: tuple[int, int] = (0, 0)  # address, bytes
        self._closed = False
        code = self.cann.function("aclInit")(None)
        if code not in _ALREADY_INITIALISED:
            self.cann.check(code, "aclInit")
        self.cann.call("aclrtSetDevice", device)
        self._own_stream = stream is None
        self.stream: int = self._create_stream() if stream is None else stream

    @cached_property
    def family(self) -> str:
        """Product family of the device as it names itself, e.g. ``A3``."""
        name = self.cann.function("aclrtGetSocName", result=ctypes.c_char_p)()
        return profile_for((name or b"").decode()).family.value

    def _create_stream(self) -> int:
        stream = ctypes.c_void_p()
        self.cann.call("aclrtCreateStream", ctypes.byref(stream))
        return stream.value or 0

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the stream, free all memory and the stream; again is harmless."""
        if self._closed:
            return
        with contextlib.ExitStack() as steps:  # every step runs, also after one that fails
            if self._own_stream:
                steps.callback(self.cann.call, "aclrtDestroyStream", self.stream)
            for address in list(self._blocks):
                steps.callback(self._free, address)
            try:
                self.synchronise()
            finally:
                self._closed = True
                self._workspace = (0, 0)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def synchronise(self) -> None:
        """Wait until the stream has done everything."""
        self._require_open()
        self.counters.synchronisations += 1
        self.cann.call("aclrtSynchronizeStream", self.stream)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the runtime of device {self.device}")

    def _allocate(self, size: int) -> int:
        self._require_open()
        address = ctypes.c_void_p()
        self.cann.call("aclrtMalloc", ctypes.byref(address), size, _HUGE_PAGES_FIRST)
        assert address.value is not None  # noqa: S101 - aclrtMalloc succeeded
        self.counters.allocations += 1
        self.counters.live_bytes += size
        self._blocks[address.value] = size
        return address.value

    def _free(self, address: int) -> None:
        size = self._blocks.pop(address, None)
        if size is None:
            return  # freed with its runtime
        self.cann.call("aclrtFree", address)
        self.counters.frees += 1
        self.counters.live_bytes -= size

    def _copy(self, target: int, source: int, size: int, direction: int) -> None:
        self.cann.call("aclrtMemcpy", target, size, source, size, direction)

    def empty_like(self, layout: Layout) -> DeviceTensor:
        """An uninitialised device tensor of a layout.

        Raises:
            OutOfDeviceMemoryError: The device is full.
        """
        size = layout.bytes
        return DeviceTensor(layout, self._allocate(size) if size else None, self)

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceTensor:
        """An uninitialised device tensor without gaps; ``dtype`` as torch names it."""
        return self.empty_like(contiguous(dtype, shape))

    def upload(self, value: Any, *, fractal_nz: bool = False) -> DeviceTensor:
        """A copy of a torch CPU tensor or numpy array on the device, with its strides.

        Args:
            value: The array.
            fractal_nz: Store it in FRACTAL_NZ, as some operators want their weights; a torch
                tensor of at least two dimensions.

        Raises:
            ArrayError: The value is neither, or has no such storage.
            OutOfDeviceMemoryError: The device is full.
        """
        found = fractal_nz_array(value) if fractal_nz else host_array(value)
        tensor = self.empty_like(found.layout)
        if tensor.address is not None:
            try:
                self._copy(tensor.address, found.address, found.layout.bytes, _HOST_TO_DEVICE)
            except BaseException:
                tensor.close()
                raise
        return tensor

    def prepare(self, operator: str, arguments: Mapping[str, Any]) -> PreparedCall:
        """First stage of an operator: CANN checks the arguments and says what it needs.

        Args:
            operator: e.g. ``aclnnSparseFlashAttention``.
            arguments: By the vendor's name in snake case (``ascend_attn_ops.aclnn_abi``): device
                tensors or NPU tensors of torch, lists of them, numbers, texts, lists of numbers.
                An absent name is a null pointer.

        Raises:
            UnknownSignatureError: No signature of the operator is recorded.
            MissingOperatorError: This CANN does not have it.
            ArrayError: An argument is unknown or has the wrong kind.
            CannError: CANN refuses the call; the class says how.
        """
        self._require_open()
        form = signature(operator)
        _check_names(form, arguments)
        symbol = f"{operator}GetWorkspaceSize"
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        types = (*form.argument_types, ctypes.c_void_p, ctypes.c_void_p)
        function = self.cann.function(symbol, *types)
        handles = Handles(self.cann, self.counters)
        try:
            values = [
                handles.argument(parameter, arguments.get(parameter.name), self._tensor(handles))
                for parameter in form.parameters
            ]
            code = function(*values, ctypes.addressof(size), ctypes.addressof(executor))
            self.counters.refused += code != 0
            self.cann.check(code, symbol)
        except BaseException:
            handles.close()
            raise
        return PreparedCall(self, operator, size.value, executor.value or 0, handles)

    def _tensor(self, handles: Handles) -> Any:
        def handle(value: Any) -> int:
            if isinstance(value, DeviceTensor):
                value._open()
                return handles.tensor(value.layout, value.address)
            if isinstance(value, torch.Tensor) and value.device.type == "npu":
                layout = layout_of(value, fractal_nz=storage_format(value) == FRACTAL_NZ)
                return handles.tensor(layout, value.data_ptr() or None)
            where = f" on {value.device}" if isinstance(value, torch.Tensor) else ""
            raise ArrayError(
                f"a tensor argument: found {type(value).__name__}{where}; allowed: a tensor of "
                "Runtime.upload() or empty(), an NPU tensor of torch"
            )

        return handle

    def call(self, operator: str, arguments: Mapping[str, Any]) -> None:
        """Both stages with the runtime's own workspace; see :meth:`prepare`. Does not wait.

        Raises:
            OutOfDeviceMemoryError: There is no room for the workspace.
            CannError: A stage failed; nothing of the call is left behind.
        """
        with self.prepare(operator, arguments) as prepared:
            prepared.execute(*self.workspace(prepared.workspace_size))

    def workspace(self, size: int) -> tuple[int, int]:
        """Address and bytes of the runtime's workspace, made larger when ``size`` needs it.

        Calls of one stream run one after another, so that all of them share it.
        """
        address, room = self._workspace
        if size <= room:
            self.counters.workspace_reuses += size > 0
            return address, room
        if address:
            self.synchronise()  # the calls that use it must have ended
            self._workspace = (0, 0)
            self._free(address)
        self._workspace = (self._allocate(size), size)
        self.counters.workspace_allocations += 1
        return self._workspace


def _check_names(form: Signature, arguments: Mapping[str, Any]) -> None:
    known = [parameter.name for parameter in form.parameters]
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ArrayError(
            f"{form.operator}: found the arguments {', '.join(unknown)}; "
            f"allowed: {', '.join(known)}"
        )


class PreparedCall:
    """A call between its two stages; as a context manager it frees what it holds.

    Attributes:
        operator: The aclnn operator.
        workspace_size: Bytes of workspace that the first stage asked for.
    """

    def __init__(
        self, runtime: Runtime, operator: str, workspace_size: int, executor: int, handles: Handles
    ) -> None:
        self.operator = operator
        self.workspace_size = workspace_size
        self._runtime = runtime
        self._executor = executor
        self._handles = handles

    def execute(self, workspace: int = 0, size: int = 0) -> None:
        """Second stage: launch on the runtime's stream; does not wait.

        Args:
            workspace: Device address, 0 where none is needed.
            size: Its bytes.

        Raises:
            ShortWorkspaceError: The workspace is smaller than needed.
            ExecutorReusedError: The call ran already, or was closed.
            CannError: The launch failed.
        """
        if not self._executor:
            raise ExecutorReusedError(self.operator)
        if size < self.workspace_size or (self.workspace_size and not workspace):
            raise ShortWorkspaceError(self.operator, size if workspace else 0, self.workspace_size)
        cann, pointer = self._runtime.cann, ctypes.c_void_p
        function = cann.function(self.operator, pointer, ctypes.c_uint64, pointer, pointer)
        executor, self._executor = self._executor, 0  # CANN ends it, whatever the outcome
        cann.check(function(workspace, size, executor, self._runtime.stream), self.operator)
        self._runtime.counters.calls += 1

    def close(self) -> None:
        """Destroy the handles, and the executor if it never ran; again is harmless."""
        executor, self._executor = self._executor, 0
        try:
            if executor:
                self._runtime.cann.call("aclDestroyAclOpExecutor", executor)
        finally:
            self._handles.close()

    def __enter__(self) -> PreparedCall:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
