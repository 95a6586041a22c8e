"""Vendor calls built from an argument record alone."""

from __future__ import annotations

from typing import Any

from ...arguments import Parameter, parameters
from ...operator import NpuCall


def call_like_record(function: str, args: Any) -> NpuCall:
    """The call of a vendor function whose parameters are those of the record.

    Required positional parameters are passed by position, everything that differs from its
    default by name; what equals its default, or is absent, is left out.
    """
    known = parameters(args.__class__)
    positional = [p for p in known if p.required and not p.keyword_only]
    named = [p for p in known if p not in positional and not p.outputs]
    return NpuCall(
        function,
        tuple(_plain(getattr(args, p.name)) for p in positional),
        {p.name: _plain(getattr(args, p.name)) for p in named if _given(p, args)},
    )


def call_with_outputs(function: str, args: Any) -> NpuCall:
    """Like :func:`call_like_record`; with the caller's outputs it is the ``.out`` overload."""
    call = call_like_record(function, args)
    given = {p.name: _plain(getattr(args, p.name)) for p in parameters(args.__class__) if p.outputs}
    if all(value is None for value in given.values()):
        return call
    return NpuCall(f"{function}.out", call.args, {**call.kwargs, **given})


def _given(parameter: Parameter, args: Any) -> bool:
    value = getattr(args, parameter.name)
    if value is None:
        return False
    return parameter.kind in ("tensor", "tensors") or value != parameter.default


def _plain(value: Any) -> Any:
    """torch_npu takes lists where the record keeps tuples."""
    return list(value) if isinstance(value, tuple) else value
