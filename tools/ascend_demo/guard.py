"""Run a command and end it, with everything it started, as soon as standard input closes.

Run as a script: `python guard.py GRACE_SECONDS LEFTOVER_SECONDS COMMAND...`. The demo holds the
other end of standard input. However the demo ends, SIGKILL included, the operating system closes
that end, and the server goes too: it cannot be left behind. The command runs in a process group of
its own; only members of that group are ever signalled. The first line on standard output is the
command's process id, which is also its group id. The command writes to standard error.

Exit code: the command's, 128 + n when signal n ended it, 127 when it could not be started.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import psutil  # type: ignore[import-untyped]  # it ships no types

POLL_SECONDS: Final = 0.1
LEFTOVER_SECONDS: Final = 5.0


def group_members(group: int) -> list[int]:
    """Return the ids of the processes of `group` that still run (zombies do not)."""
    return [process.pid for process in psutil.process_iter() if _runs_in(process, group)]


def process_runs(process: psutil.Process) -> bool:
    """Return whether a process still runs (a zombie, or another one with its id, does not)."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _runs_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process_runs(process)
    except (ProcessLookupError, PermissionError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll `condition` for at most `seconds`; return whether it became true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def kill_group(group: int) -> None:
    """Kill what is left of the process group `group`.

    Python's resource tracker goes last: once the others are gone it removes the shared memory that
    they could not remove themselves, and ends.
    """
    for pid in group_members(group):
        if not is_resource_tracker(pid):
            _kill(pid)
    wait_until(lambda: not group_members(group), LEFTOVER_SECONDS)
    for pid in group_members(group):
        _kill(pid)


def is_resource_tracker(pid: int) -> bool:
    """Return whether a process is one that Python starts to remove shared memory at the end."""
    try:
        return any(
            "multiprocessing.resource_tracker" in word for word in psutil.Process(pid).cmdline()
        )
    except psutil.Error:
        return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def end(server: subprocess.Popen[bytes], grace: float, leftover: float) -> None:
    """Ask the command to end, give it `grace` seconds, then kill what is left of its group.

    What it started has `leftover` seconds to go by itself once the command has ended.
    """
    if server.poll() is None:
        # Only the leader: a server ends its workers itself, in its own order.
        server.terminate()
        wait_until(lambda: server.poll() is not None, grace)
    if server.poll() is not None:
        wait_until(lambda: not group_members(server.pid), leftover)
    kill_group(server.pid)
    server.wait()


def owner_is_gone() -> bool:
    """Wait one poll interval; return whether standard input was closed."""
    readable, _, _ = select.select([0], [], [], POLL_SECONDS)
    return bool(readable) and os.read(0, 1) == b""


def main(argv: list[str]) -> int:
    """Run the command until it ends or its owner is gone; return the exit code."""
    grace, leftover, command = float(argv[0]), float(argv[1]), argv[2:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the closing of standard input is the only order
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
            preexec_fn=_default_signals,  # no thread runs here
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 127
    try:
        print(server.pid, flush=True)
        while server.poll() is None and not owner_is_gone():
            pass
    finally:
        end(server, grace, leftover)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _default_signals() -> None:
    """Undo the ignored signals, which a child would inherit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
