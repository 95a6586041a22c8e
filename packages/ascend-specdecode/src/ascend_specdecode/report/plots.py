"""The plots of a report, drawn with matplotlib without a display."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ascend_specdecode.observability.trace import Lane
from ascend_specdecode.report.record import RunRecord

_LANES: Final = (Lane.DRAFT, Lane.AHEAD, Lane.SCORE, Lane.VERIFY)
_COLOURS: Final = {
    Lane.DRAFT: "#e69f00",
    Lane.AHEAD: "#f0e442",
    Lane.SCORE: "#0072b2",
    Lane.VERIFY: "#009e73",
}  # the palette of Okabe and Ito, which colour-blind people can tell apart
_TIMELINE_STEPS: Final = 40  # target calls that the timeline shows
_NARROWEST: Final = 0.0015  # share of the timeline's width that a span is drawn with at least


def plots(record: RunRecord) -> dict[str, bytes]:
    """PNG images by file name, those that the record has data for."""
    found = {"throughput.png": throughput(record)}
    if record.runs[-1].acceptance_per_position:
        found["acceptance.png"] = acceptance(record.runs[-1].acceptance_per_position)
    if any(event.get("ph") == "X" for event in record.events):
        found["timeline.png"] = timeline(record.events)
    return found


def acceptance(shares: Sequence[float]) -> bytes:
    """Accepted share of drafts by position of the drafted token."""
    figure, axes = _figure(5.0, 3.0)
    positions = range(1, len(shares) + 1)
    bars = axes.bar(positions, [100 * share for share in shares], color="#0072b2")
    axes.bar_label(bars, fmt="%.0f %%")
    axes.set(
        title="Acceptance by position",
        xlabel="position of the drafted token",
        ylabel="accepted (% of drafts)",
        ylim=(0, 110),
    )
    axes.set_xticks(list(positions))
    return _png(figure)


def timeline(events: Sequence[Mapping[str, Any]]) -> bytes:
    """What ran when, one row per lane, over the first steps; beside each lane what it took.

    Drafts that are looked up take microseconds beside a target's milliseconds, so a span is drawn
    with a width that can be seen; the figures beside the lanes are the true ones.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    scores = [span for span in spans if span["cat"] == Lane.SCORE.value][:_TIMELINE_STEPS]
    end = max((span["ts"] + span["dur"] for span in scores), default=float("inf"))
    shown = [span for span in spans if span["ts"] <= end]
    figure, axes = _figure(9.0, 2.8)
    narrowest = _NARROWEST * max((span["ts"] + span["dur"] for span in shown), default=0.0)
    labels = []
    for row, lane in enumerate(_LANES):
        own = [span for span in shown if span["cat"] == lane.value]
        bars = [(span["ts"] / 1e3, max(span["dur"], narrowest) / 1e3) for span in own]
        edges = {"edgecolors": "white", "linewidth": 0.5} if lane is Lane.SCORE else {}
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLOURS[lane], **edges)
        labels.append(f"{lane.value}\n{_in_words([span['dur'] for span in own])}")
    axes.set_yticks(range(len(_LANES)), labels, fontsize=8)
    axes.set(title=f"The first {len(scores)} target calls", xlabel="milliseconds")
    axes.set_ylim(len(_LANES) - 0.5, -0.5)
    return _png(figure)


def _in_words(microseconds: Sequence[float]) -> str:
    total = sum(microseconds)
    if not microseconds:
        return "none"
    taken = f"{total / 1e6:.2f} s" if total >= 1e6 else f"{total / 1e3:.3g} ms"
    return f"{len(microseconds)} call{'s' * (len(microseconds) != 1)}, {taken}"


def throughput(record: RunRecord) -> bytes:
    """Tokens per second of each run."""
    figure, axes = _figure(5.0, 1.1 + 0.6 * len(record.runs))
    names = [run.name for run in record.runs]
    bars = axes.barh(names, [run.tokens_per_second for run in record.runs], color="#009e73")
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.margins(x=0.15)
    axes.set(title="Throughput over all requests", xlabel="tokens per second")
    axes.invert_yaxis()
    return _png(figure)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    return figure, figure.subplots()


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
