"""What ran when, as spans for the Chrome trace viewer and Perfetto.

Format: the JSON object format of the Trace Event Format (Google, "Trace Event Format"), which
chrome://tracing and ui.perfetto.dev open: complete events ("ph": "X") with times in microseconds.
"""

from __future__ import annotations

import enum
import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs


class Lane(enum.StrEnum):
    """A row of the timeline."""

    DRAFT = "draft"
    AHEAD = "draft ahead"
    SCORE = "target"
    VERIFY = "verify"
    REQUEST = "requests"


@attrs.frozen
class Span:
    """Something that took time.

    Attributes:
        lane: the row it is drawn in.
        name: what it is called there.
        start: engine time in seconds.
        end: engine time in seconds.
        values: numbers and words about it, such as batch and k.
    """

    lane: Lane
    name: str
    start: float
    end: float
    values: dict[str, Any] = attrs.field(factory=dict)


class Trace:
    """The newest spans of an engine, at most ``capacity`` of them.

    Attributes:
        dropped: older spans that had to make room.
    """

    def __init__(self, capacity: int) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self.enabled = capacity > 0
        self.dropped = 0

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans, oldest first."""
        return tuple(self._spans)

    def add(self, lane: Lane, name: str, start: float, end: float, **values: Any) -> None:
        """Keep a span, where the engine traces."""
        if self.enabled:
            self.dropped += len(self._spans) == self._spans.maxlen
            self._spans.append(Span(lane, name, start, end, values))

    def as_chrome(self, process: str = "ascend-specdecode") -> dict[str, Any]:
        """Return the trace as the object that Chrome and Perfetto read; time starts at 0."""
        return chrome_trace(self.spans, process)

    def write(self, path: Path | str, process: str = "ascend-specdecode") -> None:
        """Write the trace as JSON."""
        text = json.dumps(self.as_chrome(process), separators=(",", ":"))
        Path(path).write_text(text + "\n", encoding="utf-8")


def chrome_trace(spans: Iterable[Span], process: str) -> dict[str, Any]:
    """Return spans as a Chrome trace object.

    Requests overlap each other, so they are asynchronous events ("b", "e") of their own.
    """
    listed = list(spans)
    origin = min((span.start for span in listed), default=0.0)
    lanes = {lane: number for number, lane in enumerate(Lane, start=1)}
    events: list[dict[str, Any]] = [_metadata("process_name", 0, process)]
    events += [_metadata("thread_name", lanes[lane], lane.value) for lane in lanes]
    for number, span in enumerate(listed):
        start, end = ((time - origin) * 1e6 for time in (span.start, span.end))
        base = {"name": span.name, "cat": span.lane.value, "pid": 1, "tid": lanes[span.lane]}
        if span.lane is Lane.REQUEST:
            begin = {"ph": "b", "id": number, "ts": start, "args": span.values}
            events += [base | begin, base | {"ph": "e", "id": number, "ts": end}]
        else:
            events.append(base | {"ph": "X", "ts": start, "dur": end - start, "args": span.values})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 1, "tid": thread, "args": {"name": value}}
