"""Processes of a server that was killed, with small ones in the place of vLLM's."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ascend_vllm_plugin import (
    EnvironmentVariableError,
    register,
    register_general,
    server_watch,
)
from ascend_vllm_plugin.server_watch import ServerProcess, name_server, watch_server

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux only")

SECONDS = 30.0
SERVER = """
import subprocess, sys, time
from ascend_vllm_plugin.server_watch import name_server
if sys.argv[1] == "named":
    name_server()
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]])
time.sleep(600)
"""
CHILD = """
import os, signal, sys, time
from pathlib import Path
from ascend_vllm_plugin import server_watch
server_watch.POLL_SECONDS = 0.1
server_watch.ORDERLY_SECONDS = {orderly}
{before}
server_watch.watch_server()
{after}
print(os.getpid(), flush=True)
time.sleep(600)
"""
TELL = """
def leave(number, frame):
    print("asked to end", time.monotonic(), flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, leave)
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
FORKED = "os.fork()"


@pytest.fixture(autouse=True)
def _nothing_watched(monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_SERVER", "")
    monkeypatch.setattr(server_watch, "_watching", [])


def fields(pid):
    """State, parent and more of a process; none of a process that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return []


def parent(pid):
    return int(fields(pid)[1])


def runs(pid):
    found = fields(pid)
    return bool(found) and found[0] not in ("Z", "X")


def wait_until_gone(pids, seconds=SECONDS):
    """Seconds until none of the processes runs; those that still do after so long."""
    start = time.monotonic()
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() - start < seconds:
        time.sleep(0.05)
    return time.monotonic() - start, left


class Family:
    """A server and what it started: `pids`, as they print themselves, and further lines."""

    def __init__(self, child, count, named="named"):
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, named, child], stdout=subprocess.PIPE, text=True
        )
        self.pids = []
        while len(self.pids) < count:
            line = self.server.stdout.readline()
            assert line
            if line.strip().isdecimal():
                self.pids.append(int(line))

    def kill_server(self):
        self.server.kill()
        self.server.wait()

    def close(self):
        self.kill_server()
        for pid in self.pids:
            if runs(pid):
                os.kill(pid, 9)
        self.server.stdout.close()


@pytest.fixture
def family():
    started = []

    def start(*, before="", after="", orderly=5.0, count=1, named="named"):
        child = CHILD.format(before=before, after=after, orderly=orderly)
        started.append(Family(child, count, named))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_process_is_asked_to_end_when_its_server_was_killed(family, tmp_path):
    said = tmp_path / "said"
    call = f"server_watch.when_server_is_gone(lambda: Path({str(said)!r}).touch())"
    one = family(before=TELL, after=call)
    assert not said.exists()
    one.kill_server()
    assert wait_until_gone(one.pids)[1] == []
    assert "asked to end" in one.server.stdout.read()
    assert said.exists()


def test_control_a_process_whose_server_has_no_name_stays(family):
    one = family(before=TELL, named="nameless")
    one.kill_server()
    assert wait_until_gone(one.pids, 3.0)[1] == one.pids


def test_one_that_does_not_listen_is_killed_after_a_while(family):
    one = family(before=DEAF, orderly=1.0)
    one.kill_server()
    seconds, left = wait_until_gone(one.pids)
    assert left == []
    assert seconds > 0.9


def test_a_call_that_fails_keeps_nothing_alive(family):
    one = family(after="server_watch.when_server_is_gone(lambda: 1 / 0)")
    one.kill_server()
    assert wait_until_gone(one.pids)[1] == []


def test_a_forked_process_is_watched_as_well(family):
    one = family(after=FORKED, count=2)
    one.kill_server()
    assert wait_until_gone(one.pids)[1] == []


def test_a_process_further_below_leaves_its_parent_time_to_end_it(family):
    one = family(after=FORKED, count=2, orderly=3.0)
    below, child = sorted(one.pids, key=lambda pid: parent(pid) == one.server.pid)
    one.kill_server()
    assert wait_until_gone([child])[1] == []
    assert runs(below)
    assert wait_until_gone([below])[1] == []


def test_the_server_itself_is_not_watched(monkeypatch):
    name_server()
    threads = server_watch.threading.active_count()
    monkeypatch.setattr(server_watch.os, "register_at_fork", lambda **_: None)
    watch_server()
    assert server_watch.threading.active_count() == threads


@pytest.mark.parametrize("entry", [register, register_general])
def test_both_entry_points_watch(entry, monkeypatch):
    calls = []
    monkeypatch.setattr("ascend_vllm_plugin.registration.watch_server", lambda: calls.append(1))
    entry()
    assert calls == [1]


def test_nothing_happens_without_a_server():
    watch_server()
    assert server_watch._watching == []


def test_a_server_of_another_machine_is_not_missed(monkeypatch):
    there = ServerProcess(pid=1, started=1, space="another machine")
    monkeypatch.setenv("ASCEND_VLLM_SERVER", there.name())
    assert not there.runs()
    watch_server()
    assert server_watch._watching == []


def test_a_name_is_read_as_it_was_written():
    current = ServerProcess.current()
    assert ServerProcess.named(current.name()) == current
    assert current.is_here()
    assert current.runs()


@pytest.mark.parametrize("value", ["12", "12 13", "a b c", "-1 3 x"])
def test_another_value_is_refused(value, monkeypatch):
    monkeypatch.setenv("ASCEND_VLLM_SERVER", value)
    with pytest.raises(EnvironmentVariableError, match=r"ASCEND_VLLM_SERVER.*`ascend-vllm serve`"):
        watch_server()


def test_a_later_process_with_the_same_id_is_another_one():
    current = ServerProcess.current()
    assert not ServerProcess(current.pid, current.started - 1, current.space).runs()


def test_a_process_that_nobody_collected_has_ended():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = server_watch._state_and_start(child.pid)[1]
    server = ServerProcess(child.pid, started, "here")
    assert server.runs()
    child.stdin.close()
    assert wait_until_gone([child.pid])[1] == []
    assert not server.runs()
    child.wait()
