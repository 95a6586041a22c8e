from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import attrs
import pytest
from ascend_demo.errors import ServerError, SetupError
from ascend_demo.server import choose_port, fetch, log_tail, serving
from fakes import HERE, all_gone, fake_settings, pids_of, runs, wait_for


def test_ready_inside_and_gone_after(tmp_path: Path) -> None:
    settings = fake_settings("ok", tmp_path)
    with serving(settings) as server:
        pids = pids_of(tmp_path)
        assert server.pid == pids[0]
        assert all(runs(pid) for pid in pids)
        assert server.ended() is None
        assert "spec_decode" in fetch(f"{server.url}/metrics")
    assert not any(runs(pid) for pid in pids)
    assert log_tail(settings.log, 1) == "left in good order"


def test_waits_for_health_and_shows_the_log(tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []
    with serving(fake_settings("slow", tmp_path), lambda s, line: seen.append((s, line))) as server:
        assert server.seconds_to_ready >= 1.0
    assert seen[-1][1] == "INFO loading the model"
    assert [s for s, _ in seen] == sorted(s for s, _ in seen)


def test_crash_at_start_shows_exit_code_and_log(tmp_path: Path) -> None:
    start = time.monotonic()
    with (
        pytest.raises(ServerError, match="ended with exit code 3 before it was ready") as caught,
        serving(fake_settings("crash", tmp_path, ready=60)),
    ):
        pytest.fail("a server that crashed must not be given out")
    assert "RuntimeError: no such model [/x]" in str(caught.value)
    assert str(caught.value.log) in str(caught.value)
    assert time.monotonic() - start < 50  # it did not wait for the deadline
    assert all_gone(pids_of(tmp_path))


def test_hang_at_start_is_bounded(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="not ready after 2 s"),
        serving(fake_settings("hang", tmp_path, ready=2)),
    ):
        pytest.fail("a server that hangs must not be given out")
    assert all_gone(pids_of(tmp_path))


def test_program_that_does_not_exist(tmp_path: Path) -> None:
    settings = attrs.evolve(fake_settings("ok", tmp_path), command=("/no/such/program",))
    with pytest.raises(ServerError, match="cannot start /no/such/program"), serving(settings):
        pytest.fail("nothing runs")


@pytest.mark.parametrize("mode", ["deaf", "orphan"])
def test_what_ignores_sigterm_is_killed(tmp_path: Path, mode: str) -> None:
    with serving(fake_settings(mode, tmp_path, grace=1)):
        pids = pids_of(tmp_path)
        assert all(runs(pid) for pid in pids)
    assert not any(runs(pid) for pid in pids)


def test_a_stranger_survives(tmp_path: Path) -> None:
    """Only the server's own group is killed."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
    try:
        with serving(fake_settings("deaf", tmp_path, grace=1)):
            pass
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_exception_in_the_block_ends_the_server(tmp_path: Path) -> None:
    def fail_inside() -> None:
        with serving(fake_settings("ok", tmp_path)):
            assert all(runs(pid) for pid in pids_of(tmp_path))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not any(runs(pid) for pid in pids_of(tmp_path))


def test_server_that_ends_by_itself_is_seen(tmp_path: Path) -> None:
    with serving(fake_settings("ok", tmp_path)) as server:
        os.kill(server.pid, signal.SIGKILL)
        assert wait_for(lambda: server.ended() == 128 + signal.SIGKILL)
    assert all_gone(pids_of(tmp_path))


HOLDER = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from ascend_demo.server import serving
from fakes import fake_settings
with serving(fake_settings({mode!r}, Path({folder!r}))):
    print("ready", flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_server_goes_however_its_owner_ends(tmp_path: Path, number: signal.Signals) -> None:
    paths = [str(HERE), str(HERE.parents[1] / "tools")]
    code = HOLDER.format(paths=paths, mode="ok", folder=str(tmp_path))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == "ready\n"
        pids = pids_of(tmp_path)
        assert all(runs(pid) for pid in pids)
        owner.send_signal(number)
        owner.wait(300)
        assert all_gone(pids)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_port_in_use_is_refused() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port} on 127.0.0.1 cannot be used"):
            choose_port(port)
    assert choose_port(port) == port


def test_free_port_is_free() -> None:
    port = choose_port(None)
    with closing(socket.create_server(("127.0.0.1", port))):
        assert port > 0
