"""pytest plugin of ``ascend_attn_ops.emulator``: ``pytest --ascend-emulator=A3``.

A module of its own, outside the package, because pytest imports it in every session and the
package would import torch. Without the option nothing happens.

Options: ``--ascend-emulator=SOC`` (A2, A3, A5 or a SoC name) and, repeatable,
``--ascend-emulator-hide=OPERATOR``; what does not exist is a usage error. Fixture
``ascend_emulator``: the emulator, or the test is skipped with the reason. Marker ``ascend_npu``:
the test needs an NPU, real or emulated.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

_OPTION, _HIDE = "--ascend-emulator", "--ascend-emulator-hide"
_CHILD = "ASCEND_EMULATOR_LIBRARIES"  # set below `python -m ascend_attn_ops.emulator run`
_state = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, see the module text."""
    group = parser.getgroup("ascend", "emulated Ascend NPU (ascend-attn-ops)")
    group.addoption(
        _OPTION, metavar="SOC", default=None,
        help="emulate this NPU for the whole session: A2, A3, A5 or a SoC name",
    )  # fmt: skip
    group.addoption(
        _HIDE, metavar="OPERATOR", action="append", default=[],
        help="leave this aclnn operator out, as an older CANN would (repeatable)",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Activate before a conftest can import torch_npu."""
    early_config.addinivalue_line(
        "markers", "ascend_npu: needs an Ascend NPU, real or emulated; else skipped with the reason"
    )
    options = early_config.known_args_namespace
    early_config.stash[_state] = _State(options.ascend_emulator, options.ascend_emulator_hide)


class _State:
    """The emulator of this session, or why there is none."""

    def __init__(self, soc: str | None, hidden: list[str]) -> None:
        self.emulator: Any = None
        self.reason = f"no emulated NPU: give {_OPTION}=A2, A3 or A5"
        self.given = soc is not None
        if soc is None and not os.environ.get(_CHILD):
            return
        try:
            package = importlib.import_module("ascend_attn_ops.emulator")
        except ImportError as error:  # such as that of torch_npu, of which torch tells nothing
            self.reason = f"{_OPTION}={soc}: {error}"
            return
        if soc is None:
            self.emulator = package.current()
            return
        try:
            self.emulator = package.activate(soc, hide=hidden)
        except package.EmulatorOptionError as error:
            raise pytest.UsageError(f"{_OPTION}={soc}: {error}") from error
        except package.EmulatorUnavailableError as error:
            self.reason = f"{_OPTION}={soc}: {error}"

    def report(self) -> str:
        if self.emulator is None:
            return f"ascend emulator: {self.reason}"
        return f"ascend emulator: {self.emulator}"


def pytest_report_header(config: pytest.Config) -> str | None:
    """Which NPU is emulated, or why the one that was asked for is not."""
    state = config.stash[_state]
    return state.report() if state.given or state.emulator is not None else None


@pytest.fixture
def ascend_emulator(request: pytest.FixtureRequest) -> Any:
    """The session's :class:`ascend_attn_ops.emulator.Emulator`; the test is skipped without one."""
    state = request.config.stash[_state]
    if state.emulator is None:
        pytest.skip(state.reason)
    return state.emulator


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``ascend_npu`` where there is no NPU of either kind."""
    state = item.config.stash[_state]
    if item.get_closest_marker("ascend_npu") is None or state.emulator is not None:
        return
    if os.environ.get("ASCEND_HOME_PATH"):
        return  # a real CANN: the test runs on the device
    pytest.skip(state.reason)
