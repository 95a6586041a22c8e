"""No process of a server outlives it, however the server ended.

vLLM's engine cores and workers wait for requests of a server that was killed for as long as the
machine runs, with their memory. `ascend-vllm serve` names its process in `ASCEND_VLLM_SERVER`, and
the entry points, which vLLM calls in its processes, start a thread there that ends the process once
the server is gone. A vLLM that was started in any other way has no such thread.

What the server starts itself is asked to end at once, as the server would ask; the processes below
wait for that, because an engine core ends its workers. Each ends itself alone: Python's resource
tracker, which they share, then removes their shared memory and goes last.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import attrs

from ascend_vllm_plugin.environment import SERVER
from ascend_vllm_plugin.errors import EnvironmentVariableError

logger = logging.getLogger("vllm.ascend_vllm_plugin")

POLL_SECONDS: Final = 0.5
ORDERLY_SECONDS: Final = 10.0
"""How long a process may take to end in good order, before the next measure."""

_PROCESSES: Final = Path("/proc")
_ENDED: Final = ("Z", "X")
"""States of a process that has ended and was not collected by its parent."""


@attrs.frozen
class ServerProcess:
    """One process among all that ever run on a machine.

    Attributes:
        pid: its id, which a later process may get again.
        started: when it started, in clock ticks since the machine did.
        space: the machine since its start, and the process namespace: where `pid` means this.
    """

    pid: int
    started: int
    space: str

    @classmethod
    def current(cls) -> Self:
        """The process that calls."""
        pid = os.getpid()
        return cls(pid, _state_and_start(pid)[1], _space())

    @classmethod
    def named(cls, text: str) -> Self:
        """The process of a value of `ASCEND_VLLM_SERVER`.

        Raises:
            EnvironmentVariableError: it names none.
        """
        pid, _, rest = text.partition(" ")
        started, _, space = rest.partition(" ")
        if not (pid.isdecimal() and started.isdecimal() and space):
            raise EnvironmentVariableError(SERVER, text, "what `ascend-vllm serve` sets")
        return cls(int(pid), int(started), space)

    def name(self) -> str:
        """The value of `ASCEND_VLLM_SERVER` for it."""
        return f"{self.pid} {self.started} {self.space}"

    def is_here(self) -> bool:
        """Whether its id means the same process to the one that calls."""
        return self.space == _space()

    def runs(self) -> bool:
        """Whether it has not ended; another process with its id is another process."""
        try:
            state, started = _state_and_start(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return started == self.started and state not in _ENDED


def name_server() -> None:
    """Say, to the processes that this one starts, that it is their server.

    Linux only: elsewhere nothing happens.
    """
    if _PROCESSES.is_dir():
        os.environ[SERVER] = ServerProcess.current().name()


def watch_server() -> None:
    """End this process once its server is gone; nothing happens where none was named.

    Processes that are forked from this one are watched, too.

    Raises:
        EnvironmentVariableError: `ASCEND_VLLM_SERVER` names no process.
    """
    value = os.environ.get(SERVER, "")
    if not value or _watching:
        return
    server = ServerProcess.named(value)
    if not server.is_here():  # vLLM was handed the variable on another machine
        return
    _watching.append(server)
    os.register_at_fork(after_in_child=_start_watching)
    _start_watching()


def when_server_is_gone(call: Callable[[], object]) -> None:
    """Have something done in this process, before it ends because its server is gone."""
    _calls.append(call)


_watching: list[ServerProcess] = []
_calls: list[Callable[[], object]] = []


def _start_watching() -> None:
    (server,) = _watching
    if server.pid != os.getpid():
        # A daemon: it must not keep a process that has nothing more to do.
        threading.Thread(
            target=_watch, args=(server, os.getppid()), name="ascend-vllm server watch", daemon=True
        ).start()


def _watch(server: ServerProcess, parent: int) -> None:
    while server.runs():
        time.sleep(POLL_SECONDS)
    _make_calls()
    if parent != server.pid:
        time.sleep(ORDERLY_SECONDS)  # its parent is one of ours, and ends it
    logger.warning("process %d ends: its server, process %d, is gone", os.getpid(), server.pid)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORDERLY_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _make_calls() -> None:
    for call in _calls:
        try:
            call()
        except Exception:  # the process must end all the same
            logger.exception("%r failed", call)


def _state_and_start(pid: int) -> tuple[str, int]:
    """State and start of a process; see proc_pid_stat(5), fields 3 and 22."""
    text = (_PROCESSES / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], int(fields[19])


def _space() -> str:
    boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {(_PROCESSES / 'self/ns/pid').readlink()}"
