"""`ascend-vllm serve` after SIGKILL: its processes, shared memory and files go without help.

Nobody watches over these servers: they are started as a user starts them, and the tests look. The
control is the same server without a name for its processes to miss; it stays, and the test ends it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import attrs
import psutil
import pytest
from engines import REPOSITORY, environment, free_ports

sys.path.insert(0, str(REPOSITORY / "tools"))

from ascend_demo import guard
from ascend_demo.server import fetch
from ascend_soak import watch

pytestmark = pytest.mark.engine

MODEL = REPOSITORY / "assets" / "tiny_glm"
DRAFTS = {
    "method": "custom_class",
    "model": "ascend_vllm_plugin.SuffixProposer",
    "num_speculative_tokens": 3,
}
OPTIONS = (
    *("--served-model-name", "tiny", "--skip-tokenizer-init", "--enforce-eager"),
    *("--max-model-len", "2048", "--num-gpu-blocks-override", "64", "--dtype", "bfloat16"),
    # A worker of its own, with shared memory to leave behind.
    *("--distributed-executor-backend", "mp"),
    *("--profile", "A5", "--speculative-config", json.dumps(DRAFTS)),
)
MAIN = "import sys; from ascend_vllm_plugin import cli, serve; {}; sys.exit(cli.main())"
NAMED, NAMELESS = "pass", "serve.name_server = lambda: None"
READY_SECONDS = 600.0
GONE_SECONDS = 60.0
"""An engine core has 10 s to end in good order, and its workers 10 s more."""


@attrs.frozen
class Server:
    """A server of a process group of its own, and the folder for all that it leaves."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path

    def is_ready(self) -> bool:
        """Whether it answers."""
        assert self.process.poll() is None, (self.folder / "log").read_text()[-6000:]
        try:
            fetch(f"http://127.0.0.1:{self.port}/health")
        except OSError:
            return False
        return True

    def family(self) -> dict[psutil.Process, str]:
        """Itself, all below it, and its group, with their names."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        found = {}
        for pid in {one.pid for one in below} | set(guard.group_members(self.process.pid)):
            with suppress(psutil.NoSuchProcess):  # some are short while the model loads
                one = psutil.Process(pid)
                found[one] = one.name()
        return found

    def counters(self) -> list[str]:
        """Files of counters of speculation."""
        return [path.name for path in self.folder.glob("**/*.speculation*")]

    def kill(self) -> None:
        """SIGKILL to the server alone."""
        self.process.kill()
        self.process.wait()


@attrs.frozen
class Remains:
    """What a killed server had, and what of it was left when nothing more went away."""

    names: list[str]
    shared: int
    counters: int
    processes_left: list[str]
    shared_left: list[str]
    counters_left: list[str]


@contextmanager
def started(folder: Path, port: int, change: str = NAMED) -> Iterator[Server]:
    """A server that starts; whatever of it is left at the end is killed."""
    (folder / "temporary").mkdir(parents=True)
    own = {
        "TMPDIR": str(folder / "temporary"),
        # A socket's path is short, so vLLM's are where all temporary files are.
        "VLLM_RPC_BASE_PATH": tempfile.gettempdir(),
    }
    command = [sys.executable, "-c", MAIN.format(change), "serve", str(MODEL)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *OPTIONS, "--port", str(port)],
            env=environment(simulate=False, **own),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Server(process, port, folder)
    finally:
        guard.kill_group(process.pid)
        process.wait()


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextmanager
def completion(port: int, tokens: int) -> Iterator[HTTPConnection]:
    """A completion that was asked for, as a stream."""
    asked = {"model": "tiny", "prompt": [5, 6, 7, 8] * 4, "max_tokens": tokens, "stream": True}
    body = json.dumps({**asked, "detokenize": False, "ignore_eos": True, "temperature": 0})
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        yield connection


def kill_and_look(server: Server) -> Remains:
    """Kill a server and wait for all that it had to go away."""
    family = server.family()
    names = {one.pid: name for one, name in family.items()}
    shared, counters = watch.shared_memory(server.process.pid), server.counters()
    server.kill()

    def left() -> list[str]:
        alive = {one.pid for one in family if guard.process_runs(one)}
        alive |= set(guard.group_members(server.process.pid))
        return [f"{pid} {names.get(pid)}" for pid in sorted(alive)]

    def stale() -> list[str]:
        return sorted(str(path) for path in shared if path.exists())

    wait_for(lambda: not (left() or stale() or server.counters()), GONE_SECONDS)
    return Remains(
        list(names.values()), len(shared), len(counters), left(), stale(), server.counters()
    )


def killed_in_the_middle(folder: Path, port: int, change: str = NAMED) -> Remains:
    """Kill a server that streams an answer."""
    with started(folder, port, change) as server:
        assert wait_for(server.is_ready, READY_SECONDS)
        with completion(port, 1900) as connection:
            assert connection.getresponse().readline().startswith(b"data: ")
            return kill_and_look(server)


def killed_while_loading(folder: Path, port: int) -> Remains:
    """Kill a server whose engine core has begun."""
    with started(folder, port) as server:
        assert wait_for(
            lambda: any("EngineCore" in name for name in server.family().values()), READY_SECONDS
        )
        return kill_and_look(server)


@attrs.frozen
class Outcome:
    """What three servers left, and what one after them did."""

    remains: dict[str, Remains]
    answer: bytes
    left_after_sigterm: list[int]


def serve_again(folder: Path, port: int) -> tuple[bytes, list[int]]:
    """An answer of a server on a port, and its processes that outlived SIGTERM."""
    with started(folder, port) as server:
        assert wait_for(server.is_ready, READY_SECONDS)
        with completion(port, 3) as connection:
            answer = connection.getresponse().read()
        os.kill(server.process.pid, signal.SIGTERM)
        server.process.wait(READY_SECONDS)
        return answer, watch.wait_until_gone(server.process.pid, GONE_SECONDS)


def killed_and_served_again(folder: Path, port: int) -> tuple[Remains, bytes, list[int]]:
    """What one server leaves, and what the next one on its port does."""
    return killed_in_the_middle(folder / "middle", port), *serve_again(folder / "again", port)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("killed")
    first, second, third = free_ports(3)
    with ThreadPoolExecutor(max_workers=3) as pool:
        served = pool.submit(killed_and_served_again, folder, first)
        loading = pool.submit(killed_while_loading, folder / "loading", second)
        control = pool.submit(killed_in_the_middle, folder / "control", third, NAMELESS)
        middle, answer, left = served.result()
        remains = {"middle": middle, "loading": loading.result(), "control": control.result()}
    return Outcome(remains, answer, left)


@pytest.mark.parametrize("name", ["middle", "loading"])
def test_no_process_outlives_the_server(name: str, outcome: Outcome) -> None:
    found = outcome.remains[name]
    assert any("EngineCore" in one for one in found.names)
    assert found.processes_left == []


@pytest.mark.parametrize("name", ["middle", "loading"])
def test_no_shared_memory_and_no_counters_outlive_the_server(name: str, outcome: Outcome) -> None:
    found = outcome.remains[name]
    assert found.shared_left == []
    assert found.counters_left == []


def test_the_server_had_a_worker_shared_memory_and_counters(outcome: Outcome) -> None:
    found = outcome.remains["middle"]
    assert any("Worker" in one for one in found.names)
    assert found.shared > 0
    assert found.counters == 1


def test_control_without_a_name_the_engine_and_its_memory_stay(outcome: Outcome) -> None:
    found = outcome.remains["control"]
    assert any("EngineCore" in one for one in found.processes_left)
    assert len(found.shared_left) > 0
    assert len(found.counters_left) == 1


def test_a_second_server_answers_on_the_same_port(outcome: Outcome) -> None:
    assert outcome.answer.rstrip().endswith(b"[DONE]")
    assert outcome.left_after_sigterm == []
