"""Moving calls to the emulated NPU, and comparing what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

import ascend_attn_ops as ops
from ascend_attn_ops.arguments import parameters

DEFAULT_TOLERANCE = ops.Tolerance(2**-7, 1e-4, 0.005)
Arguments = dict[str, Any]


@attrs.frozen(eq=False)
class Case:
    """A legal call with real values.

    Attributes:
        op: Operator name.
        name: Label.
        build: CPU arguments by name from a random generator.
        control: Changes to the arguments that the reference must notice.
        families: Products it is legal for.
        unspecified: Results that the vendor leaves undefined for this call.
        before: Turns NPU arguments into the form that the device wants (private formats).
    """

    op: str
    name: str
    build: Callable[[torch.Generator], Arguments]
    control: Callable[[Arguments], Arguments]
    families: tuple[str, ...] = ("A2", "A3", "A5")
    unspecified: frozenset[str] = frozenset()
    before: Callable[[Arguments], Arguments] = lambda arguments: arguments

    @property
    def operator(self) -> ops.Operator[Any]:
        return ops.operator_named(self.op)

    def arguments(self) -> Arguments:
        return self.build(torch.Generator().manual_seed(11))


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``function`` of every tensor of an argument."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(entry, function) for entry in value)
    return value


def on_npu(arguments: Mapping[str, Any]) -> Arguments:
    """Copies on the device; a tensor that is passed twice stays one tensor."""
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return moved.setdefault(id(tensor), tensor.npu())

    return {name: mapped(value, move) for name, value in arguments.items()}


def copied(arguments: Mapping[str, Any]) -> Arguments:
    """CPU copies, for a run that writes in place."""
    return {name: mapped(value, torch.clone) for name, value in arguments.items()}


def results(op: ops.Operator[Any], arguments: Arguments, **options: Any) -> dict[str, Any]:
    """What a call returns and writes, by name, on the CPU."""
    returned = op(**arguments, **options)
    returned = returned if isinstance(returned, tuple) else (returned,)
    found = {f"output {i}": t for i, t in enumerate(returned) if t is not None}
    for parameter in parameters(op.record):
        if parameter.mutated:
            found[parameter.name] = arguments[parameter.name]
    return {name: tensor.cpu() for name, tensor in found.items()}


def tolerance(case: Case) -> ops.Tolerance:
    """The operator's for the floats of the call; of int8 results see :func:`differences`."""
    tensors = [t for t in case.arguments().values() if isinstance(t, torch.Tensor)]
    known = case.operator.tolerances
    floats = {t.dtype for t in tensors if t.dtype.is_floating_point and t.dtype in known}
    return known[floats.pop()] if floats else DEFAULT_TOLERANCE


def differences(
    found: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    tolerance: ops.Tolerance = DEFAULT_TOLERANCE,
) -> list[str]:
    """Names of results that differ by more than the vendor's comparison allows."""
    assert found.keys() == wanted.keys()
    return [name for name, tensor in found.items() if _differs(tensor, wanted[name], tolerance)]


def _differs(found: torch.Tensor, wanted: torch.Tensor, t: ops.Tolerance) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return True
    if not found.numel():
        return False
    if found.dtype == torch.int8:  # the vendor's own comparison of quantised values
        return bool(((found.int() - wanted.int()).abs() > 1).any())
    if not found.is_floating_point():
        return not torch.equal(found, wanted)
    close = torch.isclose(found.double(), wanted.double(), rtol=t.rtol, atol=t.atol, equal_nan=True)
    return bool((~close).double().mean() > t.outliers)
