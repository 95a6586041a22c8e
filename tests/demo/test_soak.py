"""The soak: its judgements, and a minute of it against the real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soak
from ascend_demo import guard
from ascend_soak import load, watch
from fakes import HERE

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
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, watch.SHARED / process.stdout.readline().strip()


def test_killing_a_group_lets_its_shared_memory_be_removed() -> None:
    process, segment = hold_shared_memory()
    assert watch.shared_memory(process.pid) == {segment}
    guard.kill_group(process.pid)
    process.wait(timeout=60)
    assert watch.wait_until_removed({segment}, 60.0) == []
    assert guard.group_members(process.pid) == []


def test_control_killing_all_at_once_leaves_it() -> None:
    process, segment = hold_shared_memory()
    try:
        os.killpg(process.pid, 9)
        process.wait(timeout=60)
        assert watch.wait_until_removed({segment}, 0.5) == [segment]
    finally:
        segment.unlink(missing_ok=True)


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
