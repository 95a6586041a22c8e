"""The list of public bug reports is covered row by row; every test that it names exists."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parents[2]
SHARED_LIST = REPOSITORY.parent / "shared" / "cases" / "bug_cases.md"
CASES: list[dict[str, Any]] = tomllib.loads((TESTS / "data" / "bug_cases.toml").read_text("utf-8"))[
    "case"
]
OURS = "SPCKM"
"""Kinds of reports that concern this layer: speculation, padding, parallel, cache, mask."""
KINDS = {"F": "process", "H": "hardware"}


@cache
def collected(path: Path) -> frozenset[str]:
    """``name`` and ``Class::name`` of every test in a file."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
    return frozenset(
        name for name in found if name.rsplit("::", maxsplit=1)[-1].startswith("test_")
    )


def missing(folder: Path, names: list[str]) -> list[str]:
    """The names of tests that are not there."""
    gone = []
    for name in names:
        file, _, test = name.partition("::")
        if not (folder / file).is_file() or test not in collected(folder / file):
            gone.append(name)
    return gone


def number_of(name: str) -> int | None:
    found = re.match(r"test_case_(\d+)", name.rsplit("::", maxsplit=1)[-1])
    return None if found is None else int(found[1])


@pytest.mark.parametrize("case", CASES, ids=[str(case["row"]) for case in CASES])
def test_every_row_names_tests_or_its_layer(case: dict[str, Any]) -> None:
    assert case["kind"] in {*OURS, *KINDS}
    if "tests" in case:
        assert case["tests"]
        assert missing(TESTS, case["tests"]) == []
        assert {number_of(name) for name in case["tests"]} == {case["row"]}
    else:
        assert case["kind"] not in OURS, "a row of this layer has tests here"
        assert case["layer"]
        assert len(case["reason"]) > 20


def test_rows_are_listed_once() -> None:
    rows = [case["row"] for case in CASES]
    assert rows == sorted(set(rows))


def test_tests_of_other_layers_exist() -> None:
    if not (REPOSITORY / "packages" / "ascend-hwprofile" / "tests").is_dir():
        pytest.skip("the other packages are not beside this one (an unpacked sdist)")
    elsewhere = [name for case in CASES for name in case.get("elsewhere", [])]
    assert len(elsewhere) >= 5
    assert missing(REPOSITORY, elsewhere) == []


def test_every_case_test_belongs_to_a_row() -> None:
    mapped = {case["row"] for case in CASES if "tests" in case}
    named = {name for path in TESTS.glob("test_*.py") for name in collected(path)}
    numbers = {number_of(name) for name in named} - {None}
    assert numbers == mapped


def test_every_row_of_the_shared_list_is_mapped() -> None:
    if not SHARED_LIST.is_file():
        pytest.skip(
            f"the shared list of cases is not at {SHARED_LIST.name}'s place beside the code"
        )
    rows = re.findall(r"^\| (\d+) ([A-Z]) \|", SHARED_LIST.read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 40
    assert [(int(row), kind) for row, kind in rows] == [
        (case["row"], case["kind"]) for case in CASES
    ]


def test_control_names_that_do_not_exist_are_noticed() -> None:
    names = [
        "test_case_map.py::test_nothing",
        "test_lost.py::test_x",
        "test_cases.py::Test::test_x",
    ]
    assert missing(TESTS, names) == names
    assert missing(TESTS, ["test_case_map.py::test_rows_are_listed_once"]) == []
