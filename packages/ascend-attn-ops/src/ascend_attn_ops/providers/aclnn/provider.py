"""Provider ``aclnn``: runs a call record through the C interface of CANN, without torch_npu.

CPU tensors are copied to the device and back, and the call waits. NPU tensors are used where they
are, on torch_npu's current stream, and the call does not wait.
"""

from __future__ import annotations

import importlib
import threading
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import resources
from types import TracebackType
from typing import Any

import torch

from ...aclnn_abi import Parameter, signature
from ...arguments import parameters, tensors_of
from ...operator import Operator, Provider
from ...registry import operator_named
from . import libraries
from .headers import unconfirmed_order
from .runtime import DeviceTensor, Runtime


@cache
def _calls() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files(__package__).joinpath("calls.toml").read_text("utf-8"))


def supported_operators() -> frozenset[str]:
    """Operators of this package that the provider can run."""
    return frozenset(_calls())


def aclnn_provider(name: str) -> Provider:
    """The provider of an operator that ``calls.toml`` lists."""
    return Provider("aclnn", partial(_run, name), gap=partial(_gap, name), host=False, uploads=True)


def _gap(name: str, args: Any) -> str | None:
    private = [p.name for p in parameters(type(args)) if p.name.endswith("_dtype")]
    given = [entry for entry in private if getattr(args, entry) is not None]
    if given:
        return f"{', '.join(given)}: types that torch lacks are not described to aclnn here"
    operator = aclnn_operator(name, args, default_runtime().family)
    if not libraries.load().has(f"{operator}GetWorkspaceSize"):
        return f"this CANN has no {operator}"
    if _calls()[name].get("undocumented") and not libraries.load().emulated:
        return unconfirmed_order(signature(operator))
    return None


def aclnn_operator(name: str, args: Any, family: str) -> str:
    """The aclnn operator that serves a call on a product family."""
    entry = _calls()[name]
    for argument, operator in entry.get("given", {}).items():
        if getattr(args, argument) is not None:
            return str(operator)
    return str(entry.get("families", {}).get(family, entry["operator"]))


class _Runtimes(threading.local):
    """CANN's device belongs to a thread, and so does its runtime."""

    def __init__(self) -> None:
        self.own: Runtime | None = None
        self.borrowed: dict[int, Runtime] = {}


_runtimes = _Runtimes()


def default_runtime() -> Runtime:
    """This thread's runtime for CPU tensors, on device 0; a new one after it was closed.

    It stays until its thread ends; ``default_runtime().close()`` frees it earlier.
    """
    if _runtimes.own is None or _runtimes.own.closed:
        _runtimes.own = Runtime()
    return _runtimes.own


def current_runtime(device: torch.device) -> Runtime:
    """This thread's runtime on torch_npu's current stream of an NPU."""
    # Reading npu_stream also empties torch_npu's queue of operators that are not launched yet.
    torch_npu = importlib.import_module("torch_npu")
    stream = torch_npu.npu.current_stream(device).npu_stream
    index = device.index or 0
    runtime = _runtimes.borrowed.get(index)
    if runtime is None:
        runtime = _runtimes.borrowed[index] = Runtime(index, stream=stream)
    runtime.stream = stream
    return runtime


def _run(name: str, args: Any) -> Any:
    op = operator_named(name)
    tensor = next(iter(tensors_of(args)), None)
    if tensor is not None and tensor.device.type == "npu":
        return _on_device(op, args, tensor.device)
    with _Uploads(default_runtime()) as uploads:
        return _on_host(op, args, uploads)


def _on_device(op: Operator[Any], args: Any, device: torch.device) -> Any:
    """NPU tensors; outputs and workspace come from torch_npu's allocator."""
    runtime = current_runtime(device)
    operator = aclnn_operator(op.name, args, runtime.family)
    results = _results(op, operator, args, device)
    arguments = _arguments(op.name, operator, args, results, lambda _, tensor: tensor)
    with runtime.prepare(operator, arguments) as prepared:
        size = prepared.workspace_size
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        prepared.execute(workspace.data_ptr(), size)
    return _returned(op, results)


def _on_host(op: Operator[Any], args: Any, uploads: _Uploads) -> Any:
    """CPU tensors; what the operator writes is copied back."""
    runtime = uploads.runtime
    operator = aclnn_operator(op.name, args, runtime.family)
    results = _results(op, operator, args, torch.device("cpu"))
    arguments = _arguments(op.name, operator, args, results, uploads.place)
    runtime.call(operator, arguments)
    mutated = {p.name: getattr(args, p.name) for p in parameters(op.record) if p.mutated}
    for tensor in (results | mutated).values():
        if tensor is not None:
            uploads.place(False, tensor).copy_to(tensor)
    return _returned(op, results)


def _results(
    op: Operator[Any], operator: str, args: Any, device: torch.device
) -> dict[str, torch.Tensor]:
    """What the operator returns, by aclnn name: the caller's tensors, or new ones."""
    outputs = [p.name for p in signature(operator).parameters if p.role == "output"]
    names = _calls()[op.name].get("results", outputs)
    given = [p.name for p in parameters(op.record) if p.outputs]
    held = [tensor for name in given for tensor in getattr(args, name) or ()]
    if held:
        return dict(zip(names, held, strict=True))
    return {
        name: torch.empty(meta.shape, dtype=meta.dtype, device=device)
        if name in outputs
        else getattr(args, name)
        for name, meta in zip(names, op.outputs(args), strict=True)
    }


def _returned(op: Operator[Any], results: Mapping[str, torch.Tensor]) -> Any:
    if op.returns == "()":
        return None
    found = tuple(results.values())
    return found if op.returns.startswith("(") else found[0]


def _arguments(
    name: str,
    operator: str,
    args: Any,
    results: Mapping[str, torch.Tensor],
    place: Callable[[bool, torch.Tensor], Any],
) -> dict[str, Any]:
    """The aclnn arguments by name; ``place`` gives the device copy of a tensor, maybe in NZ."""
    entry, found = _calls()[name], {}
    for parameter in signature(operator).parameters:
        value: Any = results.get(parameter.name)
        if parameter.role != "output":
            value = _input(name, parameter, args)
        elif parameter.optional and value is not None and value.shape == (0,):
            value = None
        nz = parameter.name in entry.get("fractal_nz", ())
        found[parameter.name] = _placed(parameter, value, partial(place, nz))
    for argument, switch in entry.get("null_unless", {}).items():
        if not getattr(args, switch):
            found[argument] = None
    return found


def _input(name: str, parameter: Parameter, args: Any) -> Any:
    entry = _calls()[name]
    fixed = entry.get("fixed", {})
    if parameter.name in fixed:
        return fixed[parameter.name]
    ours = entry.get("names", {}).get(parameter.name, parameter.name)
    value = getattr(args, ours, None) if parameter.optional else getattr(args, ours)
    if parameter.name in entry.get("values", {}):
        value = entry["values"][parameter.name][value]
    return entry.get("absent", {}).get(parameter.name) if value is None else value


def _placed(parameter: Parameter, value: Any, place: Callable[[torch.Tensor], Any]) -> Any:
    if value is None or parameter.kind not in ("tensor", "tensors"):
        return value
    if parameter.kind == "tensor":
        return place(value)
    members = (value,) if isinstance(value, torch.Tensor) else value
    return [place(member) for member in members]


class _Uploads:
    """Device copies of CPU tensors, one per tensor however often it is passed; freed at the end."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._copies: dict[tuple[Any, ...], DeviceTensor] = {}

    def place(self, fractal_nz: bool, tensor: torch.Tensor) -> DeviceTensor:
        """The copy of a tensor."""
        layout = fractal_nz, tensor.dtype, tensor.shape, tensor.stride()
        # Tensors without elements have no address that could tell them apart.
        key = (tensor.data_ptr() or id(tensor), *layout)
        if key not in self._copies:
            self._copies[key] = self.runtime.upload(tensor, fractal_nz=fractal_nz)
        return self._copies[key]

    def __enter__(self) -> _Uploads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.runtime.synchronise()  # what was launched still reads them
        finally:
            for copy in self._copies.values():
                copy.close()
