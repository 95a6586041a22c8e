"""A server process that is ready inside the `with` block and gone after it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import attrs

from ascend_demo import guard
from ascend_demo.errors import ServerError, SetupError

HOST: Final = "127.0.0.1"
POLL_SECONDS: Final = 0.25
TAIL_LINES: Final = 30
# A proxy named in the environment must not see requests to this machine.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
OnWait = Callable[[float, str], None]
"""Called while waiting with (seconds waited, last line of the log)."""


@attrs.frozen
class ServerSettings:
    """How to run a server.

    Attributes:
        command: program and arguments.
        environment: the whole environment of the process.
        port: where it will listen, on 127.0.0.1.
        log: file that receives its output.
        health: path that answers 200 once the server is ready.
        ready_seconds: how long it may take to become ready.
        grace_seconds: how long it may take to end after SIGTERM.
        leftover_seconds: how long what it started may stay when it has ended.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    port: int
    log: Path
    health: str = "/health"
    ready_seconds: float = 300.0
    grace_seconds: float = 20.0
    leftover_seconds: float = guard.LEFTOVER_SECONDS

    @property
    def url(self) -> str:
        """Base address of the server."""
        return f"http://{HOST}:{self.port}"


@attrs.frozen
class RunningServer:
    """A server that answered its health check."""

    settings: ServerSettings
    pid: int
    seconds_to_ready: float
    _guard: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """Base address of the server."""
        return self.settings.url

    def ended(self) -> int | None:
        """Return the exit code of a server that ended by itself, else None."""
        return self._guard.poll()


def choose_port(wanted: int | None) -> int:
    """Return `wanted` if nothing listens there, or a free port.

    Raises:
        SetupError: the port is in use, or may not be used.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted or 0))
        except OSError as error:
            raise SetupError(
                f"port {wanted} on {HOST} cannot be used: {error.strerror}; "
                "pass another --port, or none for a free one"
            ) from error
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    settings: ServerSettings, on_wait: OnWait = lambda _seconds, _line: None
) -> Iterator[RunningServer]:
    """Start the server, wait until it is ready, and end it on every way out of the block.

    Raises:
        ServerError: it could not be started, ended before it was ready, or was not ready in time;
            the message holds the end of its log.
    """
    process = _start_guard(settings)
    pid: int | None = None
    try:
        pid = _read_pid(process, settings)
        seconds = _wait_until_ready(process, settings, on_wait)
        yield RunningServer(settings, pid, seconds, process)
    finally:
        _stop(process, pid, settings.grace_seconds + settings.leftover_seconds)


def _start_guard(settings: ServerSettings) -> subprocess.Popen[bytes]:
    waits = (str(settings.grace_seconds), str(settings.leftover_seconds))
    command = [sys.executable, str(Path(guard.__file__)), *waits]
    with settings.log.open("wb") as log:
        return subprocess.Popen(
            [*command, *settings.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=dict(settings.environment),
            # Ctrl-C in the terminal reaches us only; we then end the server in good order.
            start_new_session=True,
        )


def _read_pid(process: subprocess.Popen[bytes], settings: ServerSettings) -> int:
    assert process.stdout is not None  # noqa: S101  # it is a pipe: told to Popen above
    line = process.stdout.readline()
    if not line:
        raise _failure("the server could not be started", settings)
    return int(line)


def _wait_until_ready(
    process: subprocess.Popen[bytes], settings: ServerSettings, on_wait: OnWait
) -> float:
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        if process.poll() is not None:
            problem = f"the server ended with exit code {process.returncode} before it was ready"
            raise _failure(problem, settings)
        if _is_healthy(settings):
            return waited
        if waited > settings.ready_seconds:
            problem = f"the server was not ready after {settings.ready_seconds:.0f} s"
            raise _failure(problem, settings)
        on_wait(waited, log_tail(settings.log, 1))
        time.sleep(POLL_SECONDS)


def _is_healthy(settings: ServerSettings) -> bool:
    try:
        with _OPENER.open(settings.url + settings.health, timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False  # nothing listens yet, or it is not ready: the caller's deadline decides


def _failure(problem: str, settings: ServerSettings) -> ServerError:
    return ServerError(problem, settings.log, log_tail(settings.log, TAIL_LINES))


def _stop(process: subprocess.Popen[bytes], pid: int | None, waits: float) -> None:
    """Close the guard's standard input, which is its order to end the server, and wait.

    Args:
        waits: how long the guard waits for others in this, in seconds.
    """
    assert process.stdin is not None  # noqa: S101  # both are pipes: told to Popen above
    assert process.stdout is not None  # noqa: S101
    process.stdin.close()
    try:
        process.wait(waits + guard.LEFTOVER_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        if pid is not None:
            guard.kill_group(pid)
    finally:
        process.stdout.close()


def log_tail(log: Path, lines: int) -> str:
    """Return the last lines of a log that are not empty, without terminal colours."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 65536))
        text = stream.read().decode(errors="replace")
    shown = [line for line in _plain(text).splitlines() if line.strip()]
    return "\n".join(shown[-lines:])


def _plain(text: str) -> str:
    from rich.text import Text

    return Text.from_ansi(text).plain


def call_worker(url: str, method: str, seconds: float = 30.0) -> str:
    """Return what a method of the first worker answers; needs `VLLM_SERVER_DEV_MODE=1` there.

    Raises:
        OSError: nobody answers, or the server has no such method.
        ValueError: the answer is not what vLLM's `/collective_rpc` gives.
    """
    body = json.dumps({"method": method}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/collective_rpc", body, headers)  # noqa: S310  # ours
    with _OPENER.open(request, timeout=seconds) as response:
        answer = json.loads(response.read())
    try:
        return str(answer["results"][0])
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"/collective_rpc answered {answer!r}") from error


def fetch(url: str, seconds: float = 10.0) -> str:
    """Return what `url`, on this machine, answers."""
    with _OPENER.open(url, timeout=seconds) as response:
        return str(response.read().decode())
