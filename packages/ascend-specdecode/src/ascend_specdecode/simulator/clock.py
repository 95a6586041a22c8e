"""Virtual time on asyncio and trio: waiting costs nothing, and every run is the same again."""

from __future__ import annotations

import asyncio
import importlib
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

import anyio

from ascend_specdecode.errors import ArgumentError, SpecDecodeError

T = TypeVar("T")

Backend: TypeAlias = Literal["asyncio", "trio"]
"""The event loop to run on."""


class DeadlockError(SpecDecodeError):
    """Every task waits for another and no timer will end that: a real program would hang."""

    def __init__(self) -> None:
        super().__init__("every task waits for another one, and no timer is set")


_END_OF_TIME: Final = 1e8
"""Virtual seconds that no run lives to see; asyncio sleeps "for ever" in steps of a day."""


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for ``timeout`` seconds, says that they have passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        # With something ready the timeout is 0: what a deadlock cancels can still clean up.
        if timeout is None or (timeout > 0.0 and self.now > _END_OF_TIME):
            raise DeadlockError
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop whose clock jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return float(self._jumping.now)


def run_virtual(
    function: Callable[[], Awaitable[T]], backend: Backend = "asyncio", *, seed: int = 0
) -> T:
    """Run an async function in virtual time, from time 0 (asyncio) or the clock's start (trio).

    Args:
        function: what to run.
        backend: asyncio or trio; trio must be installed.
        seed: of trio's own choice of which ready task runs first; asyncio has no such choice.

    Raises:
        ArgumentError: the backend is unknown or not installed.
        DeadlockError: nothing can go on any more (asyncio).
    """
    check_backend(backend)
    if backend == "trio":
        return _run_trio(function, seed)
    options = {"loop_factory": VirtualTimeLoop}
    return anyio.run(function, backend=backend, backend_options=options)


def check_backend(backend: str) -> None:
    """Refuse an event loop that is unknown or not installed.

    Raises:
        ArgumentError: says which are allowed.
    """
    if backend not in get_args(Backend):
        raise ArgumentError("backend", repr(backend), "'asyncio' or 'trio'")
    try:
        importlib.import_module(backend)
    except ImportError:
        raise ArgumentError("backend", "'trio'", "'asyncio', as trio is not installed") from None


def _run_trio(function: Callable[[], Awaitable[T]], seed: int) -> T:
    # Not by anyio.run: older versions hand no clock on to trio.
    trio: Any = importlib.import_module("trio")
    testing: Any = importlib.import_module("trio.testing")
    # Trio shuffles ready tasks on purpose; Hypothesis makes that repeatable in the same way.
    scheduling: Any = importlib.import_module("trio._core._run")
    scheduling._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduling._r.seed(seed)
    result: T = trio.run(function, clock=testing.MockClock(autojump_threshold=0))
    return result
