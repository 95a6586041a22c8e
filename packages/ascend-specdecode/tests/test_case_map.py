"""The lists of bug reports and of property families name tests that exist, and miss none."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parents[2]
SHARED_LIST = REPOSITORY.parent / "shared" / "cases" / "bug_cases.md"
CONCERN_US = {"S", "F"}
"""Kinds of reports: speculation, and process or configuration."""


def listed(file: str, table: str) -> list[dict[str, Any]]:
    return list(tomllib.loads((TESTS / "data" / file).read_text("utf-8"))[table])


CASES = listed("bug_cases.toml", "case")
FAMILIES = listed("property_families.toml", "family")


def names_of_tests(path: Path) -> set[str]:
    """Names of the test functions of a file; none where it is not there."""
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text("utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("test_")}


def absent(folder: Path, names: list[str]) -> list[str]:
    """Those of ``file::test`` that do not exist below a folder."""
    split = [(name, *name.split("::")) for name in names]
    return [name for name, file, test in split if test not in names_of_tests(folder / file)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["row"]))
def test_a_row_has_tests_here_or_a_layer_that_has(case: dict[str, Any]) -> None:
    assert case["kind"] in CONCERN_US
    if "tests" in case:
        assert case["tests"]
        assert absent(TESTS, case["tests"]) == []
        wanted = f"test_case_{case['row']:02d}_"
        assert all(name.split("::")[1].startswith(wanted) for name in case["tests"])
    else:
        assert case["layer"].startswith("ascend-")
        assert len(case["reason"]) > 20
        assert case["elsewhere"]


def test_tests_of_other_layers_exist() -> None:
    if not (REPOSITORY / "packages" / "ascend-attn-backends" / "tests").is_dir():
        pytest.skip("the other packages are not beside this one (an unpacked sdist)")
    elsewhere = [name for case in CASES for name in case.get("elsewhere", [])]
    assert len(elsewhere) >= 4
    assert absent(REPOSITORY, elsewhere) == []


def test_every_test_of_a_case_is_listed() -> None:
    here = {
        f"{path.name}::{name}"
        for path in TESTS.glob("test_*.py")
        for name in names_of_tests(path)
        if re.match(r"test_case_\d", name)
    }
    assert here == {name for case in CASES for name in case.get("tests", [])}


def rows_of(text: str) -> list[tuple[int, str]]:
    rows = re.findall(r"^\| (\d+) ([A-Z]) \|", text, re.MULTILINE)
    return [(int(row), kind) for row, kind in rows if kind in CONCERN_US]


def test_every_row_of_the_shared_list_that_concerns_us_is_mapped() -> None:
    if not SHARED_LIST.is_file():
        pytest.skip("the shared list of cases is not beside this repository")
    rows = rows_of(SHARED_LIST.read_text("utf-8"))
    assert len(rows) > 15
    assert rows == [(case["row"], case["kind"]) for case in CASES]


def test_the_family_of_this_package_names_tests_that_exist() -> None:
    (family,) = FAMILIES
    assert family["id"] == "e"
    assert absent(TESTS, family["tests"]) == []


def test_control_what_is_not_there_is_noticed() -> None:
    gone = ["test_cases.py::test_case_99_lost", "test_lost.py::test_x"]
    assert absent(TESTS, [*gone, *CASES[0]["tests"]]) == gone
    assert rows_of("| 3 S | x\n| 4 K | y\n| 71 F | z\n") == [(3, "S"), (71, "F")]
