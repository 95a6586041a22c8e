"""`tools/demo.py` as a command, with the fake server where vLLM would be."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import closing
from pathlib import Path

import pytest
from commands import BAD_ARGUMENTS, FAILURES, DemoCommand, work_of
from fakes import all_gone, pids_file, pids_of, wait_for

DEMO = DemoCommand("run_demo_with_fake.py")


def test_report_holds_what_the_server_said(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = DEMO.run(tmp_path, "ok", "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["ran_on"] == "simulated A5 on CPU"
    assert [answer["question"]["name"] for answer in report["answers"]] == ["chat", "rewrite"]
    for answer in report["answers"]:
        assert answer["text"] == "Paris is the capital."
        assert (answer["prompt_tokens"], answer["tokens"]) == (7, 3)
        assert answer["finish_reason"] == "stop"
        assert 0 < answer["seconds_to_first_token"] < answer["seconds"]
        assert answer["tokens_per_second"] == pytest.approx(3 / answer["seconds"])
        # Of this request alone, although the server counts on.
        assert answer["speculation"]["drafts"] == 4
        assert answer["acceptance_per_position"] == [0.75, 0.25]
        assert answer["acceptance_length"] == 2.0
    assert report["routing"]["rows"][0]["backend"] == "standard"
    assert "ascend-vllm-plugin" in report["versions"]
    assert all_gone(pids_of(tmp_path))
    assert not work_of(tmp_path).exists()


def test_tables_are_printed(tmp_path: Path) -> None:
    done = DEMO.run(tmp_path, "ok")
    assert done.returncode == 0, done.stderr
    for part in ("Paris is the capital.", "fake rule book", "75%", "25%", "2.00", "standard"):
        assert part in done.stdout
    assert "other architectures" in done.stdout
    assert "a book of strangers" not in done.stdout  # their reasons say nothing of this layer
    assert "nothing here ran on an NPU" in done.stdout.replace("\n", " ")


def test_port_in_use_starts_nothing(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        done = DEMO.run(tmp_path, "ok", "--port", port)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"error: port {port} on 127.0.0.1 cannot be used" in done.stderr
    assert not pids_file(tmp_path).exists()


@pytest.mark.parametrize(("arguments", "code", "message"), BAD_ARGUMENTS)
def test_bad_arguments_start_nothing(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    DEMO.assert_starts_nothing(tmp_path, arguments, code, message)


@pytest.mark.parametrize(
    ("mode", "code", "message"),
    [
        *FAILURES,
        ("hang", 4, "not ready after 2 s"),
        ("dies", 5, "request 'chat' failed"),
        ("no-metrics", 5, "request 'chat' failed"),
    ],
)
def test_failures_end_with_their_code(tmp_path: Path, mode: str, code: int, message: str) -> None:
    DEMO.assert_fails(tmp_path, mode, code, message, "--ready-seconds", "2")
    assert (work_of(tmp_path) / "server.log").is_file()  # the message points to it


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_while_starting_end_the_server(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with DEMO.started(tmp_path, "hang") as process:
        pids = pids_of(tmp_path)
        process.send_signal(number)
        assert process.wait(300) == code
    assert all_gone(pids)
    assert not work_of(tmp_path).exists()
    assert "the server was ended" in (tmp_path / "out").read_text()


def test_killed_demo_leaves_no_server(tmp_path: Path) -> None:
    """As a test runner does that gives up on Ctrl-C after half a second."""
    with DEMO.started(tmp_path, "deaf", "--keep-serving") as process:
        pids = pids_of(tmp_path)
        process.kill()
        process.wait()
        assert all_gone(pids)


def test_ctrl_c_in_a_terminal_group(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the whole foreground group; the server still ends in order."""
    with DEMO.started(tmp_path, "ok", "--keep-serving", session=True) as process:
        assert wait_for(lambda: "until Ctrl-C" in (tmp_path / "out").read_text(), 60)
        pids = pids_of(tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(300) == 0
    assert all_gone(pids)


def test_keep_serving_tells_when_the_server_ends(tmp_path: Path) -> None:
    with DEMO.started(tmp_path, "ok", "--keep-serving") as process:
        out = tmp_path / "out"
        assert wait_for(lambda: "until Ctrl-C" in out.read_text(), 60)
        os.kill(pids_of(tmp_path)[0], signal.SIGKILL)
        assert process.wait(300) == 4
    assert "the server ended with exit code 137" in out.read_text()
    assert all_gone(pids_of(tmp_path))
