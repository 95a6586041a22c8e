"""Plans in the routing file while an engine runs, and after it was killed."""

import signal
import subprocess
import sys
import time

import attrs
import pytest

from ascend_vllm_plugin import RoutingTable, read_routing
from ascend_vllm_plugin.plan_reports import PlanReports
from ascend_vllm_plugin.routing import DraftPlans

BEGUN = RoutingTable(
    mode="simulated",
    profile="Ascend950",
    vllm="0.30.0",
    model="a/model",
    speculation=None,
    rows=(),
    plans=DraftPlans(layers=2, per_step=1, builds=0, hits=0, evictions=0),
)

ENGINE = """
import sys, time
from pathlib import Path
from ascend_vllm_plugin import read_routing
from ascend_vllm_plugin.plan_reports import PlanReports
path, counts = Path(sys.argv[1]), {"builds": 0, "hits": 0, "evictions": 0}
PlanReports(read_routing(path), lambda: dict(counts), path, seconds=0.01)
counts.update(builds=7, hits=3)
print("works", flush=True)
time.sleep(600)
"""


@pytest.fixture
def counts():
    return {"builds": 0, "hits": 0, "evictions": 0}


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_that_was_killed_has_left_its_plans(signum, tmp_path):
    path = tmp_path / "routing.json"
    BEGUN.write(path)
    command = [sys.executable, "-c", ENGINE, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "works\n"
            wait_for(lambda: read_routing(path).plans.builds == 7)
        finally:
            process.send_signal(signum)
        assert process.wait(60) == -signum
    assert read_routing(path) == attrs.evolve(
        BEGUN, plans=attrs.evolve(BEGUN.plans, builds=7, hits=3)
    )
    assert [one.name for one in tmp_path.iterdir()] == ["routing.json"]


def test_the_end_writes_what_no_look_has_seen(counts, tmp_path):
    path = tmp_path / "routing.json"
    reports = PlanReports(BEGUN, lambda: dict(counts), path, seconds=3600)
    counts["builds"] = 5
    assert not path.exists()
    assert reports.stop().builds == 5
    assert read_routing(path).plans.builds == 5


def test_a_file_is_written_only_when_plans_have_changed(counts, tmp_path):
    path = tmp_path / "routing.json"
    looks = []

    def counters():
        looks.append(1)
        return dict(counts)

    reports = PlanReports(BEGUN, counters, path, seconds=0.001)
    wait_for(lambda: len(looks) > 3)
    assert not path.exists()
    reports.stop()


def test_without_a_file_there_is_no_thread(counts):
    reports = PlanReports(BEGUN, lambda: dict(counts), None)
    assert not reports._thread.is_alive()
    counts["hits"] = 2
    assert reports.stop().hits == 2


def test_a_folder_that_is_gone_stops_nobody(counts, tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    reports = PlanReports(BEGUN, lambda: dict(counts), folder / "routing.json", seconds=0.001)
    folder.rmdir()
    counts["builds"] = 1
    caplog.set_level("ERROR", logger="vllm.ascend_vllm_plugin")
    wait_for(lambda: caplog.text)
    assert reports.stop().builds == 1
    assert "the plans are not in the routing file: " in caplog.text
