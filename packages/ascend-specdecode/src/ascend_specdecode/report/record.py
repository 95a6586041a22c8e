"""The file of a run: a Chrome trace that also carries what was counted.

chrome://tracing and ui.perfetto.dev open it as it is: the Trace Event Format lets ``otherData``
hold anything, and that is where the summaries are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.observability.statistics import Statistics

_FORMAT: Final = "ascend-specdecode run, version 1"


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(values)


@attrs.frozen
class RunSummary:
    """What one run of the prompts counted.

    Attributes:
        name: what the run is called, such as "k = 0" or "ngram, k = 4".
        seconds: wall time from the first request to the last token.
        tokens: tokens generated.
        steps: target calls.
        drafts: verified rows that had drafts.
        acceptance_length: mean tokens that such a row emitted; 0 without drafts.
        acceptance_per_position: accepted share of drafts by position.
        draft_seconds: time in the drafter.
        score_seconds: time in the target.
        verify_seconds: time in the verifier.
    """

    name: str
    seconds: float
    tokens: int
    steps: int
    drafts: int
    acceptance_length: float
    acceptance_per_position: tuple[float, ...] = attrs.field(converter=_numbers)
    draft_seconds: float
    score_seconds: float
    verify_seconds: float

    @classmethod
    def of(cls, name: str, seconds: float, statistics: Statistics) -> RunSummary:
        """The summary of an engine's statistics."""
        return cls(
            name=name,
            seconds=seconds,
            tokens=statistics.generation_tokens,
            steps=statistics.steps,
            drafts=statistics.drafts,
            acceptance_length=statistics.acceptance_length,
            acceptance_per_position=statistics.acceptance_per_position(),
            draft_seconds=statistics.draft_seconds,
            score_seconds=statistics.score_seconds,
            verify_seconds=statistics.verify_seconds,
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0


@attrs.frozen(eq=False)
class RunRecord:
    """Runs of the same prompts, and the trace of the last of them.

    Attributes:
        settings: what was run, by name.
        runs: the summaries; where there are two, the first is the one without drafts.
        events: trace events of the last run, see :class:`ascend_specdecode.Trace`.
    """

    settings: Mapping[str, str]
    runs: Sequence[RunSummary]
    events: Sequence[Mapping[str, Any]]

    @property
    def speed_up(self) -> float | None:
        """Tokens per second of the last run in times of the first; None for a single run."""
        first, last = self.runs[0], self.runs[-1]
        if len(self.runs) < 2 or not first.tokens_per_second:
            return None
        return last.tokens_per_second / first.tokens_per_second


def write_record(record: RunRecord, path: Path | str) -> None:
    """Write a record as JSON."""
    data = {
        "traceEvents": list(record.events),
        "displayTimeUnit": "ms",
        "otherData": {
            "format": _FORMAT,
            "settings": dict(record.settings),
            "runs": [attrs.asdict(run) for run in record.runs],
        },
    }
    Path(path).write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")


def read_record(path: Path | str) -> RunRecord:
    """Read a record.

    Raises:
        ArgumentError: the file cannot be read, or ``ascend-specdecode run`` did not write it.
    """
    allowed = "a file that `ascend-specdecode run --trace` wrote"
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ArgumentError("trace", f"{path}: {error.strerror}", allowed) from error
    except ValueError as error:
        raise ArgumentError("trace", f"{path}, which is not JSON ({error})", allowed) from error
    other = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(other, dict) or other.get("format") != _FORMAT:
        found = other.get("format") if isinstance(other, dict) else "no otherData.format"
        raise ArgumentError("trace", f"{path} with {found}", allowed)
    try:
        runs = [RunSummary(**run) for run in other["runs"]]
        record = RunRecord(other["settings"], runs, data["traceEvents"])
    except (KeyError, TypeError) as error:
        raise ArgumentError("trace", f"{path}, incomplete ({error})", allowed) from error
    if not runs:
        raise ArgumentError("trace", f"{path} without runs", allowed)
    return record
