"""Every row of the vendor's flash_attn test tables: accepted on A5, plan of the same size."""

from __future__ import annotations

import ast
import csv
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ascend_attn_ops as ops
from ascend_hwprofile import profile_for

TABLES = Path(
    os.environ.get(
        "ASCEND_VENDOR_TABLES",
        Path(__file__).parents[4] / "shared" / "specs" / "vendor_tables",
    )
)
FILES = sorted(TABLES.glob("flash_attn_*.csv"))
TENSORS = (
    "q", "k", "v", "block_table", "cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv",
    "sinks", "attn_mask", "metadata",
)  # fmt: skip
LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")
SCALARS = (
    "softmax_scale", "mask_mode", "win_left", "win_right", "max_seqlen_q", "max_seqlen_kv",
    "layout_q", "layout_kv", "layout_out", "return_softmax_lse",
)  # fmt: skip
ROW_COUNT = 217
pytestmark = pytest.mark.skipif(not FILES, reason=f"no vendor tables in {TABLES}")


def rows_of(file: Path) -> list[dict[str, str]]:
    csv.field_size_limit(10**7)
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def parse(text: str | None) -> Any:
    return ast.literal_eval(text) if text else None


def case_of(row: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of flash_attn, as data, and the row's scalar attributes."""
    attributes = parse(row["attributes"])
    shapes, dtypes = parse(row["tensor_view_shapes"]), parse(row["tensor_dtypes"])
    strides = parse(row.get("tensor_view_strides")) or (None,) * len(TENSORS)
    data: dict[str, Any] = {name: attributes[name] for name in SCALARS if name in attributes}
    for name, shape, dtype, stride in zip(TENSORS, shapes, dtypes, strides, strict=True):
        if shape is None:
            continue
        data[name] = {"shape": list(shape), "dtype": dtype}
        if stride is not None:
            data[name]["strides"] = list(stride)
        if name in LENGTHS:
            data[name] = {
                "shape": list(shape), "dtype": dtype, "values": attributes[f"{name}_values"],
            }  # fmt: skip
    return data, attributes


def plan_case(data: dict[str, Any], attributes: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the flash_attn_metadata call of the same row."""
    q, kv = data["q"]["shape"], data["k"]["shape"]
    heads = {"TND": 1, "BSND": 2, "BNSD": 1, "PA_BBND": 2, "PA_BNBD": 1, "PA_NZ": 1}
    shared = {
        name: value
        for name, value in data.items()
        if name in (*LENGTHS, *SCALARS) and name not in ("softmax_scale", "return_softmax_lse")
    }
    return shared | {
        "num_heads_q": q[heads[data["layout_q"]]],
        "num_heads_kv": kv[heads[data["layout_kv"]]],
        "head_dim": q[-1],
        "batch_size": attributes["batch_size"],
    }


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_every_row_is_accepted_on_a5_and_nowhere_else(file: Path) -> None:
    a5, a3 = profile_for("A5"), profile_for("A3")
    for row in rows_of(file):
        data, attributes = case_of(row)
        name = row["testcase_name"]
        assert ops.check("flash_attn", data, a5) == [], name
        assert ops.check("flash_attn_metadata", plan_case(data, attributes), a5) == [], name
        assert [refusal.rule for refusal in ops.check("flash_attn", data, a3)] == ["product"], name


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_plan_has_the_vendors_size(file: Path) -> None:
    a5 = profile_for("A5")
    assert (a5.cube_cores, a5.vector_cores) == (36, 72)  # what the tables were made for
    for row in rows_of(file):
        data, attributes = case_of(row)
        arguments = ops.from_data(ops.FlashAttnMetadataArguments, plan_case(data, attributes))
        (meta,) = ops.flash_attn_metadata.outputs(arguments)
        assert list(meta.shape) == data["metadata"]["shape"], row["testcase_name"]


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_plans_of_the_rows_are_whole_and_balanced(file: Path) -> None:
    """Made for real, with the sanitizer's value rules on; the ends of the runs meet."""
    for row in rows_of(file):
        data, attributes = case_of(row)
        case = plan_case(data, attributes)
        arguments = ops.from_data(ops.FlashAttnMetadataArguments, case)
        assert ops.flash_attn_metadata.contract.broken_values(arguments, None) == []
        plan = ops.flash_attn_metadata.providers["reference"].run(arguments)
        assert list(plan.shape) == data["metadata"]["shape"]
        sections = int(plan[0])
        runs = plan[16 : 16 + sections * 36 * 16].view(-1, 16)
        used = [run for run in runs.tolist() if any(run)]
        heads = arguments.requests * arguments.num_heads_kv
        assert used[0][:3] == [0, 0, 0], row["testcase_name"]
        assert used[-1][3:6] == [heads, 0, 0], row["testcase_name"]
        assert all(a[3:6] == b[:3] for a, b in pairwise(used))


def test_no_row_is_lost() -> None:
    assert sum(len(rows_of(file)) for file in FILES) == ROW_COUNT


def test_a_broken_row_is_refused() -> None:
    """Negative control: the same reading, one argument wrong."""
    (file,) = (file for file in FILES if file.stem.endswith("smoke"))
    data, _ = case_of(rows_of(file)[0])
    refusals = ops.check("flash_attn", data | {"mask_mode": 2}, profile_for("A5"))
    assert [refusal.rule for refusal in refusals] == ["flash_attn.mask_mode"]
