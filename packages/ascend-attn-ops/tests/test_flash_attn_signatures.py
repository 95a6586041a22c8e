"""Signatures and vendor calls of flash_attn against the vendor's schemas; no NPU needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ascend_attn_ops as ops

DATA = Path(__file__).parent / "data" / "cann_ops_transformer_schemas.json"
RECORDED = {
    schema.name: schema
    for schema in map(torch._C.parse_schema, json.loads(DATA.read_text("utf-8"))["schemas"])
}
LEGAL = [
    (name, sample)
    for name in RECORDED
    for sample in ops.operator_named(name).samples()
    if not sample.rules
]


def shape_of(schema: Any) -> list[tuple[Any, ...]]:
    arguments = [(a.name, str(a.type), a.default_value, a.kwarg_only) for a in schema.arguments]
    return [*arguments, *((str(r.type),) for r in schema.returns)]


def mistakes(call: ops.NpuCall) -> list[str]:
    """Arguments of a call that the vendor's schema does not know, knows twice, or misses."""
    arguments = RECORDED[call.function].arguments
    positional = [a.name for a in arguments if not a.kwarg_only][: len(call.args)]
    known = {a.name for a in arguments}
    wrong = [f"unknown {name}" for name in call.kwargs if name not in known]
    wrong += [f"twice {name}" for name in call.kwargs if name in positional]
    required = [a.name for a in arguments if not a.has_default_value()]
    return wrong + [f"missing {n}" for n in required if n not in (*positional, *call.kwargs)]


@pytest.mark.parametrize("name", RECORDED)
def test_the_torch_operator_has_the_vendors_signature(name: str) -> None:
    ours = getattr(torch.ops.ascend_attn, name).default._schema
    assert shape_of(ours) == shape_of(RECORDED[name])


@pytest.mark.parametrize(("name", "sample"), LEGAL, ids=[f"{n}-{s.name}" for n, s in LEGAL])
def test_vendor_call_matches_the_schema(name: str, sample: ops.Sample) -> None:
    op = ops.operator_named(name)
    call = op.npu_calls["cann_ops_transformer"](ops.from_data(op.record, sample.data))
    assert call.function == name
    assert mistakes(call) == []
    assert "mask_mode" in call.kwargs


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (ops.NpuCall("flash_attn", (1, 2), {"atten_mask": 3}), ["unknown atten_mask", "missing v"]),
        (ops.NpuCall("flash_attn_metadata", (1, 2, 3), {"head_dim": 3}), ["twice head_dim"]),
    ],
)
def test_a_wrong_call_is_noticed(call: ops.NpuCall, found: list[str]) -> None:
    assert mistakes(call) == found
