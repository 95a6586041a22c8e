"""The operators of this package and their registration with torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from . import arguments as records
from .operator import Operator, run
from .refusals import UnknownOperatorError

_LIBRARY = torch.library.Library("ascend_attn", "DEF")
_OPERATORS: dict[str, Operator[Any]] = {}


def register(op: Operator[Any]) -> Operator[Any]:
    """Make an operator known here and as ``torch.ops.ascend_attn.<name>``.

    The kernel serves every device: the provider is chosen from the tensors' device. The fake
    kernel only infers shapes, so that it works on symbolic sizes.
    """
    _OPERATORS[op.name] = op
    _LIBRARY.define(op.schema)
    kernel = partial(_kernel, op)
    _LIBRARY.impl(op.name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ascend_attn::{op.name}", partial(_fake, op), lib=_LIBRARY)
    return op


def _kernel(op: Operator[Any], *args: Any, **kwargs: Any) -> Any:
    bound = op.record(*args, **kwargs)
    return _without_aliases(run(op, bound), bound)


def _without_aliases(outputs: Any, args: Any) -> Any:
    """Outputs, with a copy of each that is an input.

    torch cannot functionalise a custom operator that returns an input. Some CANN operators return
    the caches that they have updated in place; only their torch form copies them.
    """
    if not isinstance(outputs, tuple):
        return outputs
    inputs = {id(tensor) for tensor in records.tensors_of(args)}
    return tuple(tensor.clone() if id(tensor) in inputs else tensor for tensor in outputs)


def _fake(op: Operator[Any], *args: Any, **kwargs: Any) -> Any:
    bound = op.record(*args, **kwargs)
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    first = next(tensors, None)
    device = None if first is None else first.device
    outputs = tuple(
        torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in op.outputs(bound)
    )
    if not outputs:
        return None
    return outputs[0] if op.returns == "Tensor" else outputs


def all_operators() -> Iterator[Operator[Any]]:
    """All operators, in the order of registration."""
    return iter(_OPERATORS.values())


def operator_named(name: str) -> Operator[Any]:
    """The operator of this name.

    Raises:
        UnknownOperatorError: There is none; the message lists the known names.
    """
    try:
        return _OPERATORS[name]
    except KeyError:
        raise UnknownOperatorError(name, _OPERATORS) from None
