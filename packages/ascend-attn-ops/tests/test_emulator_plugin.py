"""The pytest plugin where no NPU can be emulated: tests are skipped with the reason, never fail."""

from __future__ import annotations

import platform
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from ascend_attn_ops.emulator import wheel

pytest_plugins = "pytester"
PLUGIN = "ascend_emulator_pytest"
TESTS = """
import pytest

def test_fixture(ascend_emulator):
    raise AssertionError("there is an NPU")

@pytest.mark.ascend_npu
def test_marker():
    raise AssertionError("there is an NPU")

def test_other():
    pass
"""


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux with a torch_npu wheel and without CANN, as far as the checks can see."""
    for name in (
        "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH", "ASCEND_EMULATOR_LIBRARIES",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(wheel, "folder", lambda: Path("/site/torch_npu"))


def run(pytester: pytest.Pytester, *arguments: str) -> Any:
    pytester.makepyfile(TESTS)
    registered = any(entry.value == PLUGIN for entry in entry_points(group="pytest11"))
    plugin = () if registered else ("-p", PLUGIN)  # installed before the package had one
    return pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider", *plugin, *arguments)


OBSTACLES = {
    "no gcc": "no C compiler was found (CC, gcc, cc); install gcc",
    "another platform": "runs on Linux on x86_64 and aarch64; this is linux on riscv64",
    "a real CANN": "a real CANN is set up here (ASCEND_HOME_PATH=/opt/cann)",
    "no torch_npu": "torch_npu is not installed; pip install torch_npu==2.13.0",
    "no cache": "set ASCEND_EMULATOR_CACHE to a folder that can be",
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_tests_are_skipped_with_the_reason(
    obstacle: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    if obstacle == "no gcc":
        monkeypatch.setenv("CC", "no-such-compiler")
    elif obstacle == "another platform":
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    elif obstacle == "a real CANN":
        monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    elif obstacle == "no torch_npu":
        monkeypatch.setattr(wheel, "folder", lambda: None)
    else:
        monkeypatch.setattr(wheel, "version", lambda: "2.13.0")
        monkeypatch.setenv("ASCEND_EMULATOR_CACHE", str(pytester.mkdir("x") / "file" / "cache"))
        (pytester.path / "x" / "file").touch()
        monkeypatch.setenv("CC", "sh")  # is found; the cache fails before it is called
    result = run(pytester, "--ascend-emulator=A3")
    # The marker lets a test run where there is a real CANN: on the NPU.
    on_device = {"failed": 1, "skipped": 1} if obstacle == "a real CANN" else {"skipped": 2}
    result.assert_outcomes(passed=1, **on_device)
    assert OBSTACLES[obstacle] in result.stdout.str()


def test_without_the_option_the_reason_is_the_option(pytester: pytest.Pytester) -> None:
    result = run(pytester)
    result.assert_outcomes(passed=1, skipped=2)
    assert "no emulated NPU: give --ascend-emulator=A2, A3 or A5" in result.stdout.str()


@pytest.mark.parametrize("soc", ["A33", "310P", ""])
def test_a_soc_that_does_not_exist_is_a_usage_error(soc: str, pytester: pytest.Pytester) -> None:
    """Control: a typing error must not skip the tests."""
    result = run(pytester, f"--ascend-emulator={soc}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"--ascend-emulator={soc}: soc: " in result.stderr.str()
