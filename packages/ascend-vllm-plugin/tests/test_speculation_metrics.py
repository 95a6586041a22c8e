"""Counters of the drafting process, read by another through a file."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ascend_vllm_plugin import EnvironmentVariableError
from ascend_vllm_plugin.speculation_metrics import (
    SpeculationCollector,
    SpeculationCounters,
    counters_of,
    export_speculation_metrics,
    metrics_folder,
)

DRAFTS = "import sys, time; from pathlib import Path\n" + (
    "from ascend_vllm_plugin.speculation_metrics import SpeculationCounters\n"
    "counters = SpeculationCounters(Path(sys.argv[1]))\n"
    "counters.add('num_late_drafts', 3); counters.set('num_speculative_tokens', 4)\n"
    "print('ready', flush=True); sys.stdin.readline()\n"
)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return metrics_folder()


def config(instance="abcde", model="ascend_vllm_plugin.SuffixProposer", rank=0):
    return SimpleNamespace(
        instance_id=instance,
        speculative_config=SimpleNamespace(method="custom_class", model=model),
        model_config=SimpleNamespace(served_model_name="glm-5"),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2, data_parallel_index=0),
    )


def scrape(*configs):
    collector = SpeculationCollector()
    for one in configs:
        collector.watch(one)
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def drafting_process(path):
    process = subprocess.Popen(
        [sys.executable, "-c", DRAFTS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_another_process_is_read_and_tidies_up(folder):
    path = folder / "abcde.0.speculation"
    with drafting_process(path) as process:
        text = scrape(config())
        process.communicate("end\n", timeout=300)
    labels = '{engine="0",model_name="glm-5"}'
    assert f"ascend:spec_decode_num_late_drafts_total{labels} 3.0" in text
    assert f"ascend:spec_decode_num_ahead_drafts_total{labels} 0.0" in text
    assert f"ascend:spec_decode_num_speculative_tokens{labels} 4.0" in text
    assert not path.exists()


def test_what_a_killed_process_left_is_removed_by_the_next(folder):
    path = folder / "abcde.0.speculation"
    with drafting_process(path) as process:
        process.kill()
        process.wait(timeout=300)
    assert path.exists()
    SpeculationCounters(folder / "other.0.speculation")
    assert not path.exists()
    assert (folder / "other.0.speculation").exists()


def test_what_a_living_process_counts_stays(folder):
    path = folder / "abcde.0.speculation"
    with drafting_process(path) as process:
        SpeculationCounters(folder / "other.0.speculation")
        assert path.exists()
        process.communicate("end\n", timeout=300)


def test_engines_are_told_apart(folder):
    counters_of(config("aaaaa")).add("num_late_drafts")
    counters_of(config("aaaaa_dp1")).add("num_late_drafts", 2)
    counters_of(config("bbbbb")).add("num_late_drafts", 5)
    shown = [line for line in scrape(config("aaaaa")).splitlines() if "late_drafts_total{" in line]
    assert [float(line.split()[-1]) for line in shown] == [1.0, 2.0]


def test_only_the_first_rank_of_a_stage_is_shown(folder):
    counters_of(config(rank=1)).add("num_late_drafts")
    assert list(folder.iterdir()) == []
    counters_of(config(rank=2)).add("num_late_drafts")  # the only stage with a drafter
    assert len(list(folder.iterdir())) == 1


def test_an_engine_without_drafts_has_no_samples():
    text = scrape(config(), config(instance=""))
    assert "# TYPE ascend:spec_decode_num_late_drafts_total counter" in text
    assert "num_late_drafts_total{" not in text


def test_drafters_of_others_are_not_watched(monkeypatch):
    monkeypatch.setattr("ascend_vllm_plugin.speculation_metrics._registered", [])
    registered = []
    monkeypatch.setattr("prometheus_client.REGISTRY.register", registered.append)
    export_speculation_metrics(config(model="other.Proposer"))
    export_speculation_metrics(SimpleNamespace(speculative_config=None))
    assert registered == []
    mine = config()
    export_speculation_metrics(mine)
    export_speculation_metrics(mine)  # vLLM checks a configuration more than once
    export_speculation_metrics(config("fghij"))
    assert len(registered) == 1


def test_a_folder_that_others_can_open_is_refused(folder):
    folder.chmod(0o750)
    with pytest.raises(EnvironmentVariableError, match=r"TMPDIR=.*only this user can open"):
        metrics_folder()


def test_unknown_counters_are_errors():
    with pytest.raises(KeyError, match="num_lost"):
        SpeculationCounters().add("num_lost")


def test_the_reader_removes_the_counters_of_its_engine_and_of_no_other(folder):
    path, other = folder / "abcde.0.speculation", folder / "other.0.speculation"
    collector = SpeculationCollector()
    collector.watch(config())
    with drafting_process(path) as process, drafting_process(other) as neighbour:
        collector.remove_files()  # both are alive, and hold their locks
        assert not path.exists()
        assert other.exists()
        for one in (process, neighbour):
            one.communicate("end\n", timeout=300)
            assert one.returncode == 0
