"""The vendor calls, as data, against the recorded torch_npu 2.13 signatures; no NPU needed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ascend_attn_ops as ops
from ascend_attn_ops.arguments import parameters

DATA = Path(__file__).parent / "data" / "torch_npu_2_13_schemas.json"
NPU_RECORDED: dict[str, str] = json.loads(DATA.read_text())
ATB_DATA = Path(__file__).parent / "data" / "torch_npu_2_13_atb_schemas.json"
RECORDED = NPU_RECORDED | json.loads(ATB_DATA.read_text())  # atb:: operators have no npu:: schema
VENDOR_TABLES = Path(
    os.environ.get(
        "ASCEND_VENDOR_TABLES",
        Path(__file__).parents[4] / "shared" / "specs" / "vendor_tables",
    )
)
LEGAL = [
    (op, sample)
    for op in ops.all_operators()
    for sample in op.samples()
    if not sample.rules and "torch_npu" in op.npu_calls
]
IDS = [f"{op.name}-{sample.name}" for op, sample in LEGAL]
NAMESPACES = ("npu", "atb")


def accepts(kind: str, value: Any) -> bool:
    """Whether a Python value may be passed for a torch schema type."""
    if kind.startswith("Optional["):
        return value is None or accepts(kind.removeprefix("Optional[")[:-1], value)
    checks = {
        "Tensor": lambda v: isinstance(v, torch.Tensor),
        "int": lambda v: type(v) is int,
        "float": lambda v: type(v) in (int, float),
        "bool": lambda v: type(v) is bool,
        "str": lambda v: type(v) is str,
        "List[int]": lambda v: isinstance(v, list) and all(type(entry) is int for entry in v),
        "List[Tensor]": lambda v: isinstance(v, list) and all(map(torch.is_tensor, v)),
    }
    return checks[kind](value)


def mistakes(call: ops.NpuCall, text: str) -> list[str]:
    """What is wrong with a call by this signature."""
    arguments = torch._C.parse_schema(text).arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    given = dict(zip([argument.name for argument in positional], call.args, strict=False))
    found = ["too many positional arguments"] if len(call.args) > len(positional) else []
    found += [f"{name} twice" for name in given.keys() & call.kwargs.keys()]
    given |= call.kwargs
    known = {argument.name: argument for argument in arguments}
    found += [f"unknown {name}" for name in given.keys() - known.keys()]
    for name, argument in known.items():
        if name not in given and not argument.has_default_value():
            found.append(f"missing {name}")
        elif name in given and not accepts(str(argument.type), given[name]):
            found.append(f"{name}: {given[name]!r} is no {argument.type}")
    return found


@pytest.mark.parametrize(("op", "sample"), LEGAL, ids=IDS)
def test_the_call_fits_the_recorded_signature(op: Any, sample: ops.Sample) -> None:
    call = op.npu_calls["torch_npu"](ops.from_data(op.record, sample.data))
    assert mistakes(call, RECORDED[call.function]) == []


@pytest.mark.parametrize(
    "op", sorted({op for op, _ in LEGAL}, key=lambda op: op.name), ids=lambda op: op.name
)
def test_record_and_vendor_signature_agree(op: Any) -> None:
    """Names, order, kinds and defaults of our record are the vendor's."""
    sample = next(sample for other, sample in LEGAL if other is op)
    call = op.npu_calls["torch_npu"](ops.from_data(op.record, sample.data))
    if op.name not in call.function:
        pytest.skip(f"{op.name} is served by {call.function}, whose signature differs by design")
    vendor = torch._C.parse_schema(RECORDED[call.function])
    ours = torch._C.parse_schema(op.schema)
    assert [describe(a) for a in ours.arguments] == [describe(a) for a in vendor.arguments]
    assert len(ours.returns) == len(vendor.returns)
    own = [parameter for parameter in parameters(op.record) if not parameter.outputs]
    assert len(own) == len(vendor.arguments)


def describe(argument: Any) -> tuple[Any, ...]:
    default = argument.default_value if argument.has_default_value() else "required"
    return argument.name, str(argument.type), argument.kwarg_only, default


def test_wrong_calls_are_noticed() -> None:
    text = RECORDED["npu_scatter_pa_kv_cache"]
    tensor = torch.zeros(1)
    good = ops.NpuCall("npu_scatter_pa_kv_cache", (tensor,) * 5, {"cache_mode": "Norm"})
    assert mistakes(good, text) == []
    assert mistakes(ops.NpuCall("f", (tensor,) * 4, {}), text) == ["missing slot_mapping"]
    assert mistakes(ops.NpuCall("f", (tensor,) * 5, {"mode": "Norm"}), text) == ["unknown mode"]
    assert mistakes(ops.NpuCall("f", (tensor,) * 5, {"cache_mode": 3}), text) == [
        "cache_mode: 3 is no Optional[str]"
    ]


def test_the_record_equals_the_schemas_read_from_a_running_torch_npu() -> None:
    path = VENDOR_TABLES.parent / "npu_schemas_2_13.json"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here; ASCEND_VENDOR_TABLES names the folder beside it")
    known = json.loads(path.read_text())
    for name, text in NPU_RECORDED.items():
        (full,) = [f"{space}::{name}" for space in NAMESPACES if f"{space}::{name}" in known]
        other = torch._C.parse_schema(known[full])
        recorded = torch._C.parse_schema(text)
        assert [describe(a) for a in recorded.arguments] == [describe(a) for a in other.arguments]
