"""What an engine shows: counters, Prometheus metrics, summary, live table, Chrome trace."""

from __future__ import annotations

import builtins
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
from engine_support import both_modes, complete, engine_of, settings

from ascend_hwprofile.report import Report, write
from ascend_specdecode import (
    DraftVerify,
    Finished,
    FinishReason,
    Histogram,
    Lane,
    MissingExtraError,
    Request,
    Span,
    Statistics,
    Summary,
    Trace,
    live_progress,
    prometheus_collector,
)
from ascend_specdecode.observability.live import progress_table
from ascend_specdecode.observability.metrics import HISTOGRAMS, PREFIX, SHARED
from ascend_specdecode.observability.trace import chrome_trace
from ascend_specdecode.simulator import SimulatedDrafter

REQUESTS = [Request([number, 1, 2], max_new_tokens=20, name=f"r{number}") for number in range(3)]


@pytest.fixture(scope="module")
def finished() -> DraftVerify[Any]:
    """An engine that served three requests: one second a step, drafts right four times in five."""
    engine = engine_of(settings(num_speculative_tokens=3, trace_capacity=1000))
    complete(engine, REQUESTS, "asyncio")
    return engine


# Counters.


def test_counters_agree_with_the_events() -> None:
    engine = engine_of(settings(num_speculative_tokens=3))
    events: list[Any] = []

    async def main() -> None:
        async with engine:
            events.extend([event async for event in engine.generate(REQUESTS[0])])

    from ascend_specdecode.simulator import run_virtual

    run_virtual(main)
    tokens = events[:-1]
    counted = engine.statistics
    assert counted.generation_tokens == sum(len(event.tokens) for event in tokens) == 20
    assert counted.steps == len(tokens)
    drafts = [event for event in tokens if event.drafted]
    assert counted.drafts == len(drafts)
    assert counted.plain_rows == len(tokens) - len(drafts)
    for position in range(3):
        assert counted.drafted[position] == sum(event.drafted > position for event in drafts)
        assert counted.accepted[position] == sum(event.accepted > position for event in drafts)
    mean = sum(event.accepted + 1 for event in drafts) / len(drafts)
    assert counted.acceptance_length == pytest.approx(mean)
    assert counted.endings == {("finished", "length"): 1}


def test_latencies_are_those_of_virtual_time() -> None:
    """Drafts that are always right: a step takes 1.3 s and gives 4 tokens, the first one 1 s."""
    drafter = SimulatedDrafter(1.0, lambda k, rows: 0.1 * k)
    engine = engine_of(settings(num_speculative_tokens=3), drafter=drafter)
    complete(engine, [Request([1, 2], max_new_tokens=21)], "asyncio")
    counted = engine.statistics
    assert counted.first_token.count == counted.request.count == 1
    assert counted.first_token.mean == pytest.approx(1.0)
    assert counted.inter_token.count == 5
    assert counted.inter_token.mean == pytest.approx(1.3 / 4)
    assert counted.request.mean == pytest.approx(1.0 + 5 * 1.3)
    assert counted.score_seconds == pytest.approx(6.0)
    assert counted.draft_seconds == pytest.approx(5 * 0.3)


def test_a_perfect_and_a_useless_drafter() -> None:
    for chance, expected in ((1.0, [1.0, 1.0]), (0.0, [0.0, 0.0])):
        engine = engine_of(settings(num_speculative_tokens=2), drafter=SimulatedDrafter(chance))
        complete(engine, [Request([1, 2], max_new_tokens=13)], "asyncio")
        assert engine.statistics.acceptance_per_position() == expected
        assert engine.statistics.acceptance_length == 1 + sum(expected)
    assert Statistics().acceptance_length == 0.0
    assert Statistics().acceptance_per_position() == []


def test_a_histogram_counts_by_upper_bound() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1]
    assert histogram.count == 4
    assert histogram.mean == pytest.approx(3.0)
    assert Histogram([1.0]).mean == 0.0


# Prometheus.


def exposed(engine: DraftVerify[Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample, as Prometheus itself would read it."""
    prometheus = pytest.importorskip("prometheus_client")
    parser = pytest.importorskip("prometheus_client.parser")
    registry = prometheus.CollectorRegistry()
    registry.register(prometheus_collector(engine, {"model_name": "tiny"}))
    text = prometheus.generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_the_counters(finished: DraftVerify[Any]) -> None:
    samples, counted = exposed(finished), finished.statistics
    model = ("model_name", "tiny")

    def sample(name: str, *labels: tuple[str, str]) -> float:
        return samples[PREFIX + name, tuple(sorted([model, *labels]))]

    assert sample("generation_tokens_total") == counted.generation_tokens == 60
    assert sample("prompt_tokens_total") == 9
    assert sample("spec_decode_num_drafts_total") == counted.drafts
    assert sample("spec_decode_num_draft_tokens_total") == sum(counted.drafted)
    assert sample("spec_decode_num_accepted_tokens_total") == sum(counted.accepted)
    for position, accepted in enumerate(counted.accepted):
        label = ("position", str(position))
        assert sample("spec_decode_num_accepted_tokens_per_pos_total", label) == accepted
    assert sample("request_success_total", ("finished_reason", "length")) == 3
    assert sample("num_requests_running") == sample("num_requests_waiting") == 0
    assert sample("time_to_first_token_seconds_count") == 3
    assert sample("time_to_first_token_seconds_bucket", ("le", "+Inf")) == 3
    assert sample("time_to_first_token_seconds_bucket", ("le", "0.001")) == 0
    assert sample("e2e_request_latency_seconds_sum") == pytest.approx(counted.request.total)


def test_names_are_those_of_vllm() -> None:
    """Read from vLLM's source where it is installed, without importing it."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("compares with the metric names of vLLM, which is not installed")
    folder = Path(found.origin).parent / "v1"
    files = [*folder.glob("metrics/*.py"), folder / "spec_decode" / "metrics.py"]
    source = "\n".join(file.read_text("utf-8") for file in files)
    shared = [counter.name for counter in SHARED]
    gauges = ["num_requests_running", "num_requests_waiting"]
    others = ["spec_decode_num_accepted_tokens_per_pos", "request_success"]
    for name in [*shared, *gauges, *others, *HISTOGRAMS]:
        assert f'"vllm:{name}"' in source, name
    assert '"vllm:ahead_used"' not in source  # the comparison can fail


def test_a_live_engine_shows_its_load() -> None:
    engine = engine_of(settings(max_num_seqs=1))
    from ascend_specdecode.simulator import run_virtual

    async def main() -> dict[Any, float]:
        async with engine:
            generation = engine.generate(REQUESTS[0])
            await anext(generation)
            return exposed(engine)

    samples = run_virtual(main)
    labels = (("model_name", "tiny"),)
    assert samples[f"{PREFIX}num_requests_running", labels] == 1
    assert samples[f"{PREFIX}cached_tokens", labels] >= 3


@pytest.mark.parametrize(
    ("package", "use", "extra"),
    [
        ("prometheus_client.registry", prometheus_collector, "metrics"),
        ("rich.live", lambda engine: live_progress(engine).__enter__(), "progress"),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, finished: Any, package: str, use: Any, extra: str
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=rf"pip install 'ascend-specdecode\[{extra}\]'"):
        use(finished)


# Summary and live table.


def test_summary_says_what_happened(finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    counted = finished.statistics
    summary = Summary.of(
        counted, 40.0, plain_tokens_per_second=1.0, speculation=finished.speculation()
    )
    assert summary.tokens_per_second == pytest.approx(1.5)
    assert summary.speed_up == pytest.approx(1.5)
    data = json.loads(json.dumps(summary.as_dict()))
    assert data["requests"] == {"finished/length": 3}
    assert data["acceptance"] == list(counted.acceptance_per_position())
    write(Report(data, summary.tables()), as_json=False)
    shown = capsys.readouterr().out
    for text in ("1.50 over 1.0 tokens per second with k = 0", "60 in 40.000 s", "3 finished"):
        assert text in shown
    assert f"{counted.acceptance_length:.2f} tokens" in shown


def test_a_loss_and_a_missing_baseline_are_not_hidden(finished: Any) -> None:
    slow = Summary.of(finished.statistics, 40.0, plain_tokens_per_second=3.0)
    assert slow.speed_up == pytest.approx(0.5)
    alone = Summary.of(finished.statistics, 40.0)
    assert alone.speed_up is None
    assert not any("speed-up" in row for table in alone.tables() for row in table.rows)


@both_modes
def test_live_table(mode: str) -> None:
    console_module = pytest.importorskip("rich.console")
    engine = engine_of(settings(mode=mode))
    complete(engine, REQUESTS, "asyncio")
    console = console_module.Console(width=100, record=True, file=io.StringIO())
    with live_progress(engine, console=console):
        console.print(progress_table(engine, 2.0))
    shown = console.export_text()
    assert f"{mode} engine" in shown
    assert "0 running, 0 waiting, 3 ended" in shown
    assert "60 (30.0 per second)" in shown
    assert f"{engine.statistics.acceptance_length:.2f}" in shown


# Trace.


def test_trace_is_what_chrome_and_perfetto_read(finished: Any, tmp_path: Path) -> None:
    finished.trace.write(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    events = data["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {lane.value for lane in Lane}
    timed = [event for event in events if event["ph"] != "M"]
    assert all(event["ts"] >= 0 and event["pid"] == 1 for event in timed)
    scored = [event for event in timed if event["name"] == "score"]
    assert len(scored) == finished.statistics.steps
    assert all(event["dur"] == pytest.approx(1e6) for event in scored)  # one virtual second
    begins = {event["id"]: event for event in timed if event["ph"] == "b"}
    ends = {event["id"]: event for event in timed if event["ph"] == "e"}
    assert begins.keys() == ends.keys()
    assert {event["name"] for event in begins.values()} == {"r0", "r1", "r2"}
    assert all(event["args"]["tokens"] == 20 for event in begins.values())
    assert all(ends[number]["ts"] > begins[number]["ts"] for number in begins)


def test_lockstep_lanes_alternate_and_pipelined_lanes_overlap() -> None:
    def overlap(mode: str) -> float:
        engine = engine_of(settings(mode=mode, trace_capacity=1000), drafter=drafter())
        complete(engine, [Request([1, 2], max_new_tokens=40)], "asyncio")
        spans = engine.trace.spans
        scored = [span for span in spans if span.lane is Lane.SCORE]
        drafted = [span for span in spans if span.lane in (Lane.DRAFT, Lane.AHEAD)]
        return sum(
            max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in scored for b in drafted
        )

    def drafter() -> SimulatedDrafter:
        return SimulatedDrafter(1.0, lambda k, rows: 0.1 * k)

    assert overlap("lockstep") == 0.0
    assert overlap("pipelined") > 2.0


def test_trace_keeps_the_newest() -> None:
    trace = Trace(2)
    for number in range(5):
        trace.add(Lane.SCORE, str(number), number, number + 1)
    assert [span.name for span in trace.spans] == ["3", "4"]
    assert trace.dropped == 3
    nothing = Trace(0)
    nothing.add(Lane.SCORE, "x", 0.0, 1.0)
    assert nothing.spans == ()
    assert nothing.as_chrome()["traceEvents"][0]["name"] == "process_name"


def test_chrome_times_start_at_zero() -> None:
    spans = [Span(Lane.DRAFT, "a", 100.0, 100.5), Span(Lane.SCORE, "b", 100.5, 101.0)]
    events = [event for event in chrome_trace(spans, "p")["traceEvents"] if event["ph"] == "X"]
    assert [(event["ts"], event["dur"]) for event in events] == [(0.0, 5e5), (5e5, 5e5)]


def test_a_finished_request_is_drawn_with_its_ending(finished: Any) -> None:
    spans = [span for span in finished.trace.spans if span.lane is Lane.REQUEST]
    assert [span.values["ending"] for span in spans] == ["finished"] * 3
    assert {span.values["reason"] for span in spans} == {FinishReason.LENGTH.value}
    assert Finished("r0", FinishReason.LENGTH).reason.value == "length"
