"""check() answers with refusals, never with an exception, whatever the shapes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale

import ascend_attn_ops as ops
from ascend_attn_ops.arguments import Parameter, parameters
from ascend_hwprofile import profile_for

SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 8, 16, 64, 128, 512]), max_size=5)
DTYPES = st.sampled_from(["float16", "bfloat16", "float32", "int8", "int32", "int64", "uint8"])
TENSORS = st.builds(lambda shape, dtype: {"shape": shape, "dtype": dtype}, SHAPES, DTYPES)
VALUES = {
    "tensor": TENSORS,
    "tensors": st.lists(TENSORS, max_size=3),
    "int": st.integers(-2, 5),
    "float": st.floats(-1, 1),
    "bool": st.booleans(),
    "str": st.sampled_from(["", "Norm", "PA_NZ", "TND", "BSND", "half"]),
    "ints": st.lists(st.integers(-1, 9), max_size=4),
}


def _value(parameter: Parameter) -> st.SearchStrategy[Any]:
    return st.none() | VALUES[parameter.kind] if parameter.optional else VALUES[parameter.kind]


@pytest.mark.parametrize("op", list(ops.all_operators()), ids=lambda op: op.name)
@settings(max_examples=scale(40))
@given(st.data())
def test_check_never_raises(op: Any, data: st.DataObject) -> None:
    legal = [sample.data for sample in op.samples() if not sample.rules]
    arguments = dict(data.draw(st.sampled_from(legal)))
    known = parameters(op.record)
    for parameter in data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3)):
        arguments[parameter.name] = data.draw(_value(parameter))
    profile = data.draw(st.sampled_from([None, "A2", "A5", "310P"]))
    for refusal in ops.check(op, arguments, profile and profile_for(profile)):
        assert refusal.found
        assert refusal.allowed


@pytest.mark.parametrize("op", list(ops.all_operators()), ids=lambda op: op.name)
@pytest.mark.parametrize("profile", ["A3", "A5"])
@pytest.mark.parametrize("shape", [[], [0]])
def test_every_tensor_may_have_an_odd_shape(op: Any, profile: str, shape: list[int]) -> None:
    """Tensors without axes and without elements, alone and all of one dtype at a time."""
    judged_for = profile_for(profile)
    for sample in (sample for sample in op.samples() if not sample.rules):
        described = {
            name: {"shape": shape, "dtype": value["dtype"]}
            for name, value in sample.data.items()
            if isinstance(value, dict)
        }
        changes = [{name: tensor} for name, tensor in described.items()]
        for dtype in sorted({tensor["dtype"] for tensor in described.values()}):
            changes.append({n: t for n, t in described.items() if t["dtype"] == dtype})
        ropes = {name: tensor for name, tensor in described.items() if "rope" in name}
        for change in (*changes, ropes):
            for refusal in ops.check(op, dict(sample.data) | change, judged_for):
                assert refusal.found
