"""From an aclnn call to a CPU function: read the arguments, check, remember, compute.

A kernel is a function of one argument: a namespace with the operator's arguments by name (see
``aclnn_abi/signatures.toml``), tensors as zero-copy CPU views, and ``vendor_dtypes``, the names of
tensors whose type torch lacks. What it returns is written to the
operator's outputs in order, with a cast, or to the tensors it changes in place where it has no
outputs; a kernel that writes by itself returns None.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from ..aclnn_abi import Parameter, Signature, UnknownSignatureError, VendorDtype, signature
from ..aclnn_abi.signatures import parse
from .abi import (
    DTYPES,
    FRACTAL_NZ,
    INNER,
    INVALID,
    NOT_EMULATED,
    NULL_POINTER,
    AclnnError,
    Memory,
    TensorHandle,
    array_values,
    format_name,
    scalar_value,
    set_shape,
    tensor_view,
    vendor_dtype,
)
from .nz import from_nz, to_nz
from .record import Call, TensorArgument

Kernel = Callable[[Any], Any]
Check = Callable[[str, Any], None]


@attrs.frozen
class Implementation:
    """An emulated operator.

    Attributes:
        signature: Its arguments.
        kernel: Computes it.
        check: Refuses illegal arguments (raises AclnnError).
        workspace: Bytes of workspace that the first stage asks for.
        resizes: Whether outputs take the shape of the result, as those do whose shape depends on
            the data; the caller makes them large enough.
    """

    signature: Signature
    kernel: Kernel
    check: Check | None = None
    workspace: int = 0
    resizes: bool = False


_IMPLEMENTATIONS: dict[str, Implementation] = {}


def kernel(
    *operators: str,
    arguments: str | None = None,
    check: Check | None = None,
    workspace: int = 0,
    resizes: bool = False,
) -> Callable[[Kernel], Kernel]:
    """Decorator: this function computes these aclnn operators.

    Args:
        operators: Full names, e.g. ``aclnnHardswish``.
        arguments: Their arguments, for operators that ``signatures.toml`` does not list:
            ``"self -> out"``, see :func:`ascend_attn_ops.aclnn_abi.signatures.parse`.
        check: Refuses illegal arguments (raises AclnnError).
        workspace: Bytes of workspace that the first stage asks for.
        resizes: Whether outputs take the shape of the result.

    Raises:
        UnknownSignatureError: No arguments are given, and ``signatures.toml`` lists none.
        SignatureError: The arguments cannot be read.
    """

    def register(function: Kernel) -> Kernel:
        for name in operators:
            known = _recorded(name) if arguments is None else parse(name, arguments)
            _IMPLEMENTATIONS[name] = Implementation(known, function, check, workspace, resizes)
        return function

    return register


def _recorded(name: str) -> Signature:
    try:
        return signature(name)
    except UnknownSignatureError as error:
        hint = f"say its arguments: kernel({name!r}, arguments='self -> out')"
        raise UnknownSignatureError(f"{error}; {hint}") from None


def load_kernels() -> dict[str, Implementation]:
    """Import this package's kernels; all emulated operators by name."""
    importlib.import_module(f"{__package__}.kernels")
    return implemented()


def implemented() -> dict[str, Implementation]:
    """All emulated operators by name."""
    return dict(_IMPLEMENTATIONS)


@attrs.frozen
class _NzCopy:
    """FRACTAL_NZ data read as ND; what a kernel writes goes back into the layout."""

    stored: torch.Tensor
    plain: torch.Tensor

    def write_back(self) -> None:
        self.stored.copy_(to_nz(self.plain, self.stored.shape))


@attrs.define
class _Prepared:
    """A call between its two stages."""

    implementation: Implementation
    arguments: SimpleNamespace
    handles: dict[str, int]
    converted: list[_NzCopy]

    @property
    def operator(self) -> str:
        return self.implementation.signature.operator

    def run(self) -> None:
        unknown = [f"{name}: {kind.name}" for name, kind in self.arguments.vendor_dtypes.items()]
        if unknown:
            raise AclnnError(NOT_EMULATED, f"{', '.join(unknown)}: checked, but not computed")
        with torch.no_grad():
            result = self.implementation.kernel(self.arguments)
            if result is not None:
                self._write(result if isinstance(result, tuple) else (result,))
            for copy in self.converted:
                copy.write_back()

    def _write(self, results: tuple[Any, ...]) -> None:
        written = self.implementation.signature.written
        outputs = [parameter for parameter in written if parameter.role == "output"]
        for parameter, value in zip(outputs or written, results, strict=True):
            target = getattr(self.arguments, parameter.name)
            if target is None or value is None or not target.numel():
                continue
            if self.implementation.resizes:
                set_shape(self.handles[parameter.name], value.shape)
                target = target.flatten()[: value.numel()].view(value.shape)
            target.copy_(value)


@attrs.frozen
class _HostCall:
    """A call of an operator that has no aclnn form."""

    operator: str
    run: Callable[[], None]


class Dispatcher:
    """The Python side of libopapi.so in this process."""

    def __init__(self, runtime: ctypes.CDLL, opapi: ctypes.CDLL) -> None:
        self._runtime = runtime
        self._opapi = opapi
        self._memory = Memory(runtime, opapi)
        self._report = runtime.emulator_report
        self._report.argtypes = [ctypes.c_char_p]
        self._create_executor = opapi.emulator_create_executor
        self._create_executor.restype = ctypes.c_void_p
        self._create_executor.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]
        self._submit_call = opapi.emulator_submit_call
        self._submit_call.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
        self._calls: dict[int, _Prepared | _HostCall] = {}
        self._numbers = itertools.count(1)
        self._kept: list[Any] = []
        self.computing = True
        self.listeners: list[Callable[[Call], None]] = []
        count = ctypes.c_int.in_dll(opapi, "emulator_operator_count").value
        names = (ctypes.c_char_p * count).in_dll(opapi, "emulator_operator_names")
        self.operators = [(name or b"").decode() for name in names]
        self._slots = (ctypes.c_void_p * count).in_dll(opapi, "emulator_slots")

    def fill_slots(self) -> None:
        """Connect every emulated operator that the libraries have."""
        for index in range(len(self.operators)):
            self.fill_slot(index)

    def fill_slot(self, index: int) -> bool:
        """Connect one operator; False when it is not emulated."""
        implementation = _IMPLEMENTATIONS.get(self.operators[index])
        if implementation is None:
            return False
        callback = self._first_stage(index, implementation)
        self._kept.append(callback)
        self._slots[index] = ctypes.cast(callback, ctypes.c_void_p).value
        return True

    def _first_stage(self, index: int, implementation: Implementation) -> Any:
        types = implementation.signature.argument_types
        form = ctypes.CFUNCTYPE(ctypes.c_int, *types, ctypes.c_void_p, ctypes.c_void_p)

        def first_stage(*raw: Any) -> int:
            *values, size, executor = raw
            with self._reporting(implementation.signature.operator) as outcome:
                if not size or not executor:
                    raise AclnnError(NULL_POINTER, "workspaceSize or executor is null")
                prepared = self._prepare(implementation, values)
                number = next(self._numbers)
                self._calls[number] = prepared
                handle = self._create_executor(index, number, implementation.workspace)
                ctypes.c_uint64.from_address(size).value = implementation.workspace
                ctypes.c_void_p.from_address(executor).value = handle
            return int(outcome.code)

        return form(first_stage)

    @contextlib.contextmanager
    def _reporting(self, operator: str) -> Iterator[SimpleNamespace]:
        """An exception becomes a code and a text: it cannot cross the C functions above us."""
        outcome = SimpleNamespace(code=0)
        try:
            yield outcome
        except AclnnError as error:
            outcome.code = error.code
            self.report(f"{operator}: {error}")
        except Exception:  # noqa: BLE001 - reported to the caller as CANN would
            outcome.code = INNER
            self.report(f"{operator}: error in the emulator\n{traceback.format_exc()}")

    def report(self, text: str) -> None:
        """Leave a text for aclGetRecentErrMsg."""
        self._report(text.encode())

    def _prepare(self, implementation: Implementation, values: list[Any]) -> _Prepared:
        parameters = implementation.signature.parameters
        reader = _ArgumentReader(self._memory)
        operator = implementation.signature.operator
        try:
            arguments = {
                parameter.name: reader.read(parameter, value)
                for parameter, value in zip(parameters, values, strict=True)
            }
            space = SimpleNamespace(**arguments, vendor_dtypes=reader.vendor_dtypes)
            if implementation.check is not None:
                implementation.check(operator, space)
        except AclnnError as error:
            self.tell(Call(operator, reader.described, refused=str(error)))
            raise
        self.tell(Call(operator, reader.described))
        handles = {
            parameter.name: value
            for parameter, value in zip(parameters, values, strict=True)
            if parameter.role != "input"
        }
        return _Prepared(implementation, space, handles, reader.converted)

    @property
    def prepared(self) -> int:
        """Number of prepared calls that their executors still hold."""
        return len(self._calls)

    def tell(self, call: Call) -> None:
        """Let everyone who records know of a call."""
        for listener in self.listeners:
            listener(call)

    def run(self, number: int) -> int:
        """Second stage of a prepared call."""
        prepared = self._calls[number]
        if not self.computing:
            return 0
        with self._reporting(prepared.operator) as outcome:
            prepared.run()
        return int(outcome.code)

    def submit(self, operator: str, function: Callable[[], None], stream: int) -> None:
        """Run a function on a stream, or record it when the stream is being captured.

        Raises:
            RuntimeError: The function failed; the text is aclGetRecentErrMsg's.
        """
        number = next(self._numbers)
        self._calls[number] = _HostCall(operator, function)
        if self._submit_call(number, stream) != 0:
            self._runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
            raise RuntimeError((self._runtime.aclGetRecentErrMsg() or b"").decode())

    def forget(self, number: int) -> None:
        """The executor of this call has ended."""
        del self._calls[number]


class _ArgumentReader:
    """Reads the C values of one call; ``described`` grows as it does."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.described: dict[str, Any] = {}
        self.converted: list[_NzCopy] = []
        self.vendor_dtypes: dict[str, VendorDtype] = {}

    def read(self, parameter: Parameter, value: Any) -> Any:
        """Python value of an argument.

        Raises:
            AclnnError: A required pointer is null, or no live handle.
        """
        pointer = parameter.kind in _POINTERS
        if pointer and not value:
            self.described[parameter.name] = None
            if not parameter.optional:
                raise AclnnError(NULL_POINTER, f"{parameter.name} is null")
            return None
        if parameter.kind == "tensor":
            return self._tensor(parameter, value)
        if parameter.kind == "tensors":
            return self._tensors(parameter, value)
        if parameter.kind in _POINTERS:
            self._memory.require_handle(value, parameter.name)
        result = _READERS.get(parameter.kind, lambda v: v)(value)
        self.described[parameter.name] = result
        return result

    def _tensor(self, parameter: Parameter, pointer: int) -> torch.Tensor:
        view, self.described[parameter.name] = self._view(parameter, pointer)
        return view

    def _tensors(self, parameter: Parameter, pointer: int) -> list[torch.Tensor]:
        self._memory.require_handle(pointer, parameter.name)
        members = array_values(pointer, ctypes.c_void_p)
        views = [self._view(parameter, member) for member in members]
        self.described[parameter.name] = [description for _, description in views]
        return [view for view, _ in views]

    def _view(self, parameter: Parameter, pointer: int) -> tuple[torch.Tensor, TensorArgument]:
        view = tensor_view(pointer, parameter.name, self._memory)
        handle = TensorHandle.from_address(pointer)
        kind = vendor_dtype(pointer)
        if kind is not None:
            self.vendor_dtypes[parameter.name] = kind
        name = None if kind is None else kind.name
        if handle.format != FRACTAL_NZ:
            return view, TensorArgument.of(view, format_name(pointer), name)
        plain = from_nz(view, list(handle.dims[: handle.rank]))
        if parameter.role != "input":
            self.converted.append(_NzCopy(view, plain))
        return plain, TensorArgument.of(plain, format_name(pointer), name)


def _dtype(number: int) -> torch.dtype:
    dtype = DTYPES.get(number)
    if dtype is None:
        raise AclnnError(INVALID, f"aclDataType {number} has no torch dtype")
    return dtype


_POINTERS = frozenset({"tensor", "tensors", "scalar", "scalars", "ints", "floats", "bools"})
_READERS: dict[str, Callable[[Any], Any]] = {
    "scalar": scalar_value,
    "scalars": lambda pointer: [scalar_value(p) for p in array_values(pointer, ctypes.c_void_p)],
    "ints": lambda pointer: array_values(pointer, ctypes.c_int64),
    "floats": lambda pointer: array_values(pointer, ctypes.c_float),
    "bools": lambda pointer: array_values(pointer, ctypes.c_bool),
    "dtype": _dtype,
    "str": lambda value: None if value is None else value.decode(),
}
