"""The vendor signatures that other tests read from files are those of the running torch_npu."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ascend_attn_ops.emulator import Emulator

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    ("name", "space"),
    [("torch_npu_2_13_schemas.json", "npu"), ("torch_npu_2_13_atb_schemas.json", "atb")],
)
def test_recorded_signatures_are_the_running_ones(name: str, space: str, npu: Emulator) -> None:
    for function, recorded in json.loads((DATA / name).read_text()).items():
        base, _, overload = function.partition(".")
        running = getattr(getattr(getattr(torch.ops, space), base), overload or "default")._schema
        text = torch._C.parse_schema(recorded)
        assert [describe(a) for a in running.arguments] == [describe(a) for a in text.arguments]
        assert len(running.returns) == len(text.returns)


def describe(argument: torch.Argument) -> tuple[object, ...]:
    default = argument.default_value if argument.has_default_value() else "required"
    return argument.name, str(argument.type), argument.kwarg_only, default
