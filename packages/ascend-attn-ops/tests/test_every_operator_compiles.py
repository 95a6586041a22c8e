"""opcheck, and torch.compile over the whole function, for every registered operator.

The call is the operator's first legal sample that a host provider computes, with values filled in;
whether the numbers are right is the business of the operator's own tests.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ascend_attn_ops as ops
from ascend_attn_ops.arguments import parameters

CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
LARGEST = 20_000_000  # elements of all tensors of a call
OWN_TEST = {"mla_prolog_v2": "no sample has host shapes; test_mla_prolog.py opchecks it"}


def filled(value: Any, rng: torch.Generator) -> Any:
    """The argument with values: floats around 1, integers 0."""
    if isinstance(value, tuple):
        return [filled(entry, rng) for entry in value]
    if not isinstance(value, torch.Tensor) or value.device.type != "meta":
        return value
    if not value.is_floating_point():
        return torch.zeros(value.shape, dtype=value.dtype)
    return (torch.rand(value.shape, generator=rng) + 0.5).to(value.dtype)


def runnable_call(op: ops.Operator[Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Positional and keyword arguments of a legal sample that the reference computes."""
    rng = torch.Generator().manual_seed(5)
    known = {argument.name for argument in torch._C.parse_schema(op.schema).arguments}
    for sample in op.samples():
        if sample.rules:
            continue
        record = ops.from_data(op.record, sample.data)
        sizes = [v.numel() for v in vars_of(record).values() if isinstance(v, torch.Tensor)]
        if sum(sizes) > LARGEST:
            continue
        values = {name: filled(value, rng) for name, value in vars_of(record).items()}
        bound = op.record(**values)
        if ops.check(op, bound, provider="reference") or op.providers["reference"].gap(bound):
            continue
        positional = tuple(values[p.name] for p in parameters(op.record) if not p.keyword_only)
        named = {p.name: values[p.name] for p in parameters(op.record) if p.keyword_only}
        return positional, {name: value for name, value in named.items() if name in known}
    return None


def vars_of(record: Any) -> dict[str, Any]:
    return {p.name: getattr(record, p.name) for p in parameters(type(record))}


@pytest.mark.parametrize("op", list(ops.all_operators()), ids=lambda op: op.name)
def test_opcheck_and_whole_graph(op: ops.Operator[Any]) -> None:
    call = runnable_call(op)
    if call is None:
        pytest.skip(OWN_TEST[op.name])
    args, kwargs = call
    function = getattr(torch.ops.ascend_attn, op.name)
    torch.library.opcheck(function, args, kwargs, test_utils=CHECKS)
    eager, traced = copy.deepcopy(args), copy.deepcopy(args)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *given: function(*given, **kwargs), fullgraph=True, backend="aot_eager"
    )
    want, got = function(*eager, **kwargs), compiled(*traced)
    torch.testing.assert_close(got, want, equal_nan=True)
    for given, expected in zip(traced, eager, strict=True):  # in-place operators
        if isinstance(given, torch.Tensor):
            torch.testing.assert_close(given, expected, equal_nan=True)
