"""Reports: what they show is what the record holds, and they hold nothing foreign."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import attrs
import pytest

from ascend_specdecode import ArgumentError, Lane, Span, Statistics
from ascend_specdecode.observability.trace import chrome_trace
from ascend_specdecode.report import (
    RunRecord,
    RunSummary,
    read_record,
    write_record,
    write_report,
)

pytest.importorskip("matplotlib", reason="the report extra installs matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"


def summary(name: str, seconds: float, shares: tuple[float, ...] = ()) -> RunSummary:
    return RunSummary(name, seconds, 100, 50, 40, 1 + sum(shares), shares, 0.1, 0.8, 0.1)


def record(faster: bool = True) -> RunRecord:
    spans = [Span(Lane.DRAFT, "draft", 0, 0.1), Span(Lane.SCORE, "score", 0.1, 0.4, {"batch": 2})]
    runs = [summary("k = 0", 2.0), summary("ngram, k = 2", 1.0 if faster else 4.0, (0.7, 0.4))]
    events = chrome_trace(spans, "test")["traceEvents"]
    return RunRecord({"model": "<script>alert(1)</script>"}, runs, events)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    write_record(record(), tmp_path / "run.json")
    found = read_record(tmp_path / "run.json")
    assert found.runs == record().runs
    assert (found.settings, found.events) == (record().settings, record().events)


def test_the_page_has_the_figures_and_plots_and_nothing_else(tmp_path: Path) -> None:
    files = write_report(record(), tmp_path / "new" / "out")
    assert [path.name for path in files] == [
        "throughput.png",
        "acceptance.png",
        "timeline.png",
        "report.html",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in files[:-1])
    page = Page(files[-1].read_text("utf-8"))
    assert page.tags.count("img") == 3
    assert "script" not in page.tags  # the name of the model is text
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    text = " ".join(page.text)
    assert "<script>alert(1)</script>" in text
    assert "100.0 tokens per second, 2.00 times k = 0, so faster than" in text


def test_a_slower_run_is_called_slower(tmp_path: Path) -> None:
    page = write_report(record(faster=False), tmp_path)[-1].read_text("utf-8")
    assert "25.0 tokens per second, 0.50 times k = 0, so slower than" in page


def test_without_drafts_and_spans_those_plots_are_left_out(tmp_path: Path) -> None:
    alone = RunRecord({}, [summary("k = 0", 2.0)], [])
    names = [path.name for path in write_report(alone, tmp_path)]
    assert names == ["throughput.png", "report.html"]


def test_the_summary_is_that_of_the_statistics() -> None:
    statistics = Statistics()
    statistics.verified(3, drafted=(1, 1), accepted=1)
    statistics.verified(1, drafted=(1, 1), accepted=2)
    statistics.generation_tokens = 9
    found = RunSummary.of("run", 3.0, statistics)
    assert found.acceptance_per_position == (1.0, 0.25)
    assert (found.acceptance_length, found.tokens_per_second) == (2.25, 3.0)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "no otherData.format"),
        ('{"otherData": {"format": "other"}}', "with other"),
        ('{"otherData": {"format": "ascend-specdecode run, version 1"}}', "incomplete"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str | None, found: str) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArgumentError, match=found) as caught:
        read_record(path)
    assert "ascend-specdecode run --trace" in str(caught.value)


def test_a_record_without_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_record(attrs.evolve(record(), runs=[]), path)
    with pytest.raises(ArgumentError, match="without runs"):
        read_record(path)
    assert json.loads(path.read_text())["traceEvents"]
