"""The soak: its judgements, and a minute of it against the real server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import pytest
import soak
from ascend_demo import guard
from ascend_demo.server import serving
from ascend_soak import killed_clients, load, watch
from ascend_soak.killed_clients import kill_clients
from ascend_soak.streams import FIRST_LINES
from fakes import HERE, fake_settings, pids_of, runs, wait_for

TOOL = str(HERE.parents[1] / "tools" / "soak.py")
MIB = 1 << 20
HOLDER = """
import sys, time
from multiprocessing import shared_memory
held = shared_memory.SharedMemory(create=True, size=4096)
held.buf[0] = 1
print(held.name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("early", "late", "flat"),
    [
        (2000, 2060, True),
        (2000, 2099, True),
        (2000, 2101, False),
        (100, 164, True),
        (100, 165, False),
    ],
)
def test_memory_is_flat_within_five_per_cent_or_64_mib(early: int, late: int, flat: bool) -> None:
    assert watch.is_flat(early * MIB, late * MIB) is flat


def test_growth_compares_the_second_and_the_last_quarter() -> None:
    warm_up, early, middle, late = [1, 1], [10, 12], [99, 99], [20, 22]
    assert watch.growth([*warm_up, *early, *middle, *late]) == (11, 21)
    assert watch.growth([1] * 7) is None


def test_errors_and_a_silent_load_are_problems() -> None:
    found = soak.Findings()
    soak._judge(load.Tally(errors=["stuck", "stuck"]), found)
    assert found.problems == ["no stream finished", "2 x stuck"]
    fine = soak.Findings()
    soak._judge(load.Tally(finished=2, seconds=[1.0, 3.0]), fine)
    assert (fine.problems, fine.numbers["median_seconds"]) == ([], 2.0)


def test_a_line_of_the_stream_is_read() -> None:
    line = 'data: {"choices": [{"text": "a", "finish_reason": null}]}'
    assert load._choice(line) == {"text": "a", "finish_reason": None}
    assert load._choice("data: [DONE]") is None
    assert load._choice("") is None
    with pytest.raises(ValueError, match="the server said"):
        load._choice('data: {"error": {"message": "broken"}}')


def hold_shared_memory() -> tuple[subprocess.Popen[str], Path]:
    """A process that holds it, once its resource tracker runs, too, which takes an `exec`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    segment = watch.SHARED / process.stdout.readline().strip()
    assert wait_for(lambda: any(map(guard.is_resource_tracker, guard.group_members(process.pid))))
    return process, segment


def test_killing_a_group_lets_its_shared_memory_be_removed() -> None:
    process, segment = hold_shared_memory()
    assert watch.shared_memory(process.pid) == {segment}
    guard.kill_group(process.pid)
    process.wait(timeout=300)
    assert watch.wait_until_removed({segment}, 60.0) == []
    assert guard.group_members(process.pid) == []


def test_control_killing_all_at_once_leaves_it() -> None:
    process, segment = hold_shared_memory()
    try:
        os.killpg(process.pid, 9)
        process.wait(timeout=300)
        assert watch.wait_until_removed({segment}, 0.5) == [segment]
    finally:
        segment.unlink(missing_ok=True)


class Answers(BaseHTTPRequestHandler):
    """Answers with two pieces and an end, on a connection that stays open; counts both."""

    protocol_version = "HTTP/1.1"
    connections = requests = 0
    missing = 0

    def setup(self) -> None:
        super().setup()
        type(self).connections += 1

    def do_POST(self) -> None:
        type(self).requests += 1
        self.rfile.read(int(self.headers["content-length"]))
        choices = [("a", None), ("b", None), ("", "length")]
        events = [{"choices": [{"text": text, "finish_reason": end}]} for text, end in choices]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body) + self.missing))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.missing > 0

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def serving_streams(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Address of a server of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def loaded(handler: type[Answers]) -> load.Tally:
    with serving_streams(handler) as url:
        one = load.Load(url, "fake", clients=2, seconds=0.5, leaving=0.0, seed=0)
        return asyncio.run(load.run_load(one, lambda *_: None))


def test_every_stream_has_a_connection_of_its_own() -> None:
    handler = type("Own", (Answers,), {})
    tally = loaded(handler)
    assert tally.errors == []
    assert handler.connections == handler.requests == tally.finished > 2


def test_a_stream_that_breaks_says_how_far_it_came() -> None:
    tally = loaded(type("Broken", (Answers,), {"missing": 10}))
    assert tally.finished == 0
    assert tally.errors
    assert all(one.startswith("RemoteProtocolError: peer closed") for one in tally.errors)
    assert all(one.endswith("after 2 pieces") for one in tally.errors)


class Streams(BaseHTTPRequestHandler):
    """Streams pieces, and counts as vLLM does.

    `aborts` says whether a reader is missed, `held_up` how many clients are so late that their
    streams have ended when somebody looks.
    """

    aborts = True
    held_up = 0
    lock = threading.Lock()
    asked = running = pieces = ended = 0

    def do_GET(self) -> None:
        with self.lock:
            values = {
                "vllm:num_requests_running": self.running,
                "vllm:kv_cache_usage_perc": self.running / 128,
                "vllm:iteration_tokens_total_count": self.pieces // killed_clients.STREAMS,
                'vllm:request_success_total{finished_reason="length"}': self.ended,
                'vllm:request_success_total{finished_reason="abort"}': 0,
            }
        self.send_response(200)
        self.end_headers()
        self.wfile.write("".join(f"{name} {value}\n" for name, value in values.items()).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        self._count(asked=1)
        if self.held_up * killed_clients.STREAMS >= self.asked:
            self._count(ended=1)
            self.wfile.write(b"data: {}\n" * FIRST_LINES)
            return
        self._count(running=1)
        gone = False
        for _ in range(asked["max_tokens"]):
            try:
                self.wfile.write(b"data: {}\n" if not gone else b"")
            except OSError:
                gone = True
                if self.aborts:
                    break
            self._count(pieces=1)
            time.sleep(0.02)
        self._count(running=-1, ended=int(not gone or not self.aborts))

    def _count(self, **changes: int) -> None:
        with self.lock:
            for name, change in changes.items():
                setattr(type(self), name, getattr(self, name) + change)

    def log_message(self, format: str, *args: object) -> None:
        return


def streams(**own: bool | int) -> AbstractContextManager[str]:
    """Address of a server with counts of its own."""
    return serving_streams(type("Streams", (Streams,), own))


def test_streams_of_a_killed_client_are_freed_long_before_their_end() -> None:
    with streams(aborts=True) as url:
        found = kill_clients(url, "fake", 60.0, tokens=4000)
    assert found.problems() == []
    assert (found.ran, found.finished, found.left) == (killed_clients.STREAMS, 0, {})
    assert found.steps < 2000
    early = attrs.evolve(found, ran=1, cache=0.0)
    assert early.problems() == [
        "2 streams of a killed client: 1 ran when it was killed",
        "2 streams of a killed client held no KV cache before it was killed",
    ]


def test_a_client_that_is_killed_too_late_is_followed_by_another() -> None:
    with streams(aborts=True, held_up=1) as url:
        found = kill_clients(url, "fake", 60.0, tokens=4000)
    assert found.problems() == []


def test_control_if_all_are_killed_too_late_the_soak_fails() -> None:
    with streams(aborts=True, held_up=killed_clients.ATTEMPTS) as url:
        found = kill_clients(url, "fake", 60.0, tokens=4000)
    assert "2 streams of a killed client: 0 ran when it was killed" in found.problems()
    assert "2 streams of a killed client: 2 ran to their end" in found.problems()


def test_a_client_is_killed_too_late_when_half_of_its_tokens_are_there() -> None:
    with streams(aborts=True) as url:
        found = kill_clients(url, "fake", 60.0, tokens=4000)
    assert not attrs.evolve(found, begun=2000).late
    assert attrs.evolve(found, begun=2001).late


def test_control_a_server_that_keeps_them_is_found() -> None:
    with streams(aborts=False) as url:
        held, *_ = kill_clients(url, "fake", 0.5, tokens=1500).problems()
    assert "the server holds {'vllm:num_requests_running': 2.0" in held


def test_control_streams_that_end_by_themselves_do_not_pass_for_aborted() -> None:
    with streams(aborts=False) as url:
        found = kill_clients(url, "fake", 120.0, tokens=600)
    assert found.left == {}
    ended, late = found.problems()
    assert ended == "2 streams of a killed client: 2 ran to their end"
    assert "freed after 600 steps; allowed is half of 600, with which they end by" in late


def test_a_client_that_is_refused_is_told() -> None:
    with closing(socket.socket()) as deaf:
        deaf.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="refused"):
            kill_clients(f"http://127.0.0.1:{deaf.getsockname()[1]}", "fake", 1.0)


@pytest.mark.parametrize(
    ("mode", "left", "seconds"), [("worker-goes", False, 60.0), ("orphan", True, 8.0)]
)
def test_what_outlives_sigkill_is_found_before_the_guard_acts(
    mode: str, left: bool, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "DRAIN_SECONDS", seconds)
    settings = attrs.evolve(fake_settings(mode, tmp_path), leftover_seconds=2 * seconds)
    found = soak.Findings()
    with serving(settings) as server:
        worker = pids_of(tmp_path)[1]
        soak.kill_and_look(server, found)
        assert runs(worker) is left
    assert found.problems == ([f"processes [{worker}] outlived SIGKILL of the server"] * left)
    assert not runs(worker)


@pytest.mark.parametrize(
    ("option", "found"), [("--clients=0", "0"), ("--leaving=2", "2"), ("--seconds=-1", "-1")]
)
def test_bad_options_are_refused(option: str, found: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        soak.main([option])
    assert caught.value.code == 2
    assert f"found {found}, allowed" in capsys.readouterr().err


@pytest.mark.engine
def test_a_minute_of_the_real_server(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, TOOL, "--seconds", "60", "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["problems"] == []
    assert found["numbers"]["finished"] > 64
    assert found["numbers"]["left_in_the_middle"] > 0
    assert found["numbers"]["shared_memory_segments"] > 0
    assert 0 < found["numbers"]["killed_streams_steps"] < killed_clients.TOKENS / 2
