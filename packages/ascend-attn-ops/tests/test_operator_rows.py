"""Accept and reject rows per operator and product, from ``data/rows_*.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import ascend_attn_ops as ops
from ascend_hwprofile import profile_for

ROWS: list[dict[str, Any]] = [
    row
    for path in sorted((Path(__file__).parent / "data").glob("rows_*.toml"))
    for row in tomllib.loads(path.read_text("utf-8"))["rows"]
]
CASES = [(row, profile) for row in ROWS for profile in row["profiles"]]
IDS = [f"{row['op']}-{profile}-{row['case']}" for row, profile in CASES]


def arguments(row: dict[str, Any]) -> dict[str, Any]:
    samples = {sample.name: sample.data for sample in ops.operator_named(row["op"]).samples()}
    data = {**samples[row["base"]], **row.get("change", {})}
    return {name: value for name, value in data.items() if name not in row.get("drop", ())}


@pytest.mark.parametrize(("row", "profile"), CASES, ids=IDS)
def test_row_gets_its_verdict(row: dict[str, Any], profile: str) -> None:
    refusals = ops.check(row["op"], arguments(row), profile_for(profile))
    found = {refusal.rule.removeprefix(f"{row['op']}.") for refusal in refusals}
    assert found == set(row.get("refused", ())), [str(refusal) for refusal in refusals]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['op']}-{row['case']}" for row in ROWS])
def test_rows_are_well_formed(row: dict[str, Any]) -> None:
    """A misspelt key must not turn a row into the untouched base sample."""
    assert row.keys() <= {"op", "case", "base", "profiles", "change", "drop", "refused"}
    assert row["profiles"]
    if row.get("refused"):
        base = {"op": row["op"], "base": row["base"]}
        changed = "change" in row or "drop" in row
        assert changed or arguments(row) == arguments(base)
