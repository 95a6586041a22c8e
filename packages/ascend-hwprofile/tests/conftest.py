from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from ascend_hwprofile import System
from ascend_hwprofile.system import CommandResult

DATA = Path(__file__).parent / "data"

settings.register_profile("ci", max_examples=200, deadline=None)
settings.register_profile("long", max_examples=20_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def table(name: str) -> list[dict[str, str]]:
    lines = (DATA / f"{name}.csv").read_text("utf8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Argument ``<name>_row`` runs a test once for each row of ``data/<name>.csv``."""
    for name in metafunc.fixturenames:
        if name.endswith("_row"):
            rows = table(name.removesuffix("_row"))
            metafunc.parametrize(name, rows, ids=[":".join([*row.values()][:2]) for row in rows])


@pytest.fixture
def transcription() -> Callable[[str], list[dict[str, str]]]:
    """Rows of ``data/<name>.csv``."""
    return table


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HWPROFILE", raising=False)


@pytest.fixture
def bare(tmp_path: Path) -> Callable[..., System]:
    """A machine with nothing on it: no environment, empty root, no modules, no commands."""

    def no_library(command: object, timeout_seconds: float) -> CommandResult:
        assert timeout_seconds > 0
        assert command
        return CommandResult(0, '{"problem": "no such file", "missing": true}\n', "")

    def make(**changes: object) -> System:
        root = tmp_path / "root"
        root.mkdir(exist_ok=True)
        given: dict[str, object] = {
            "environ": {},
            "root": str(root),
            "modules": {},
            "run": no_library,
            "version_of": lambda name: None,
            "package_folder": lambda name: None,
            "python_version": "3.11.7",
        }
        return System(**{**given, **changes})  # type: ignore[arg-type]  # test double

    return make
