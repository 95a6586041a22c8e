"""One HTML page of a run: no script, no link to anywhere, every text escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from ascend_specdecode.report.plots import plots
from ascend_specdecode.report.record import RunRecord, RunSummary

_TITLES: Final = {
    "throughput.png": (
        "Tokens per second",
        "The same prompts in the same process: without drafts, then with them.",
    ),
    "acceptance.png": (
        "Acceptance by position",
        "In how many drafts the token at each position was accepted. A token is accepted only "
        "after all before it, so the bars never rise; where they are low, a smaller k is faster.",
    ),
    "timeline.png": (
        "Timeline of drafting and verifying",
        "What ran when. In lockstep the target waits for each draft; pipelined, drafting ahead "
        "overlaps with it. Very short calls are drawn wider than they are. The trace itself opens "
        "in ui.perfetto.dev.",
    ),
}
_STYLE: Final = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.3rem .7rem;"
    "text-align:left}img{max-width:100%}h2{margin-top:2rem}"
)
_COLUMNS: Final = (
    "run", "tokens", "seconds", "tokens/s", "target calls", "acceptance length",
    "drafting (s)", "target (s)", "verifying (s)",
)  # fmt: skip


def write_report(record: RunRecord, folder: Path | str) -> list[Path]:
    """Write the plots and ``report.html`` into a folder, which is made where it is missing.

    Returns:
        The files, the page last.
    """
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    images = plots(record)
    written = []
    for name, data in images.items():
        (out / name).write_bytes(data)
        written.append(out / name)
    page = out / "report.html"
    page.write_text(html(record, images), encoding="utf-8")
    return [*written, page]


def html(record: RunRecord, images: dict[str, bytes]) -> str:
    """The page, with the images inside it."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>ascend-specdecode run</title>',
        f"<style>{_STYLE}</style></head><body>",
        "<h1>Speculative decoding run</h1>",
        f"<p>{escape(verdict(record))}</p>",
        _table(("setting", "value"), record.settings.items()),
        "<h2>Runs</h2>",
        _table(_COLUMNS, map(_row, record.runs)),
    ]
    for name, data in images.items():
        source = base64.b64encode(data).decode("ascii")
        title, text = map(escape, _TITLES[name])
        parts.append(f"<h2>{title}</h2><p>{text}</p>")
        parts.append(f'<img alt="{title}" src="data:image/png;base64,{source}">')
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def verdict(record: RunRecord) -> str:
    """One sentence that says what drafting was worth."""
    run, speed_up = record.runs[-1], record.speed_up
    if speed_up is None:
        return f"{run.tokens} tokens in {run.seconds:.1f} s."
    worth = "faster than" if speed_up > 1 else "as fast as" if speed_up == 1 else "slower than"
    return (
        f"{run.name}: {run.tokens_per_second:.1f} tokens per second, {speed_up:.2f} times "
        f"{record.runs[0].name}, so {worth} decoding without drafts; "
        f"acceptance length {run.acceptance_length:.2f}."
    )


def _row(run: RunSummary) -> Sequence[str]:
    length = f"{run.acceptance_length:.2f}" if run.drafts else "-"
    return (
        run.name, str(run.tokens), f"{run.seconds:.2f}", f"{run.tokens_per_second:.1f}",
        str(run.steps), length, f"{run.draft_seconds:.2f}", f"{run.score_seconds:.2f}",
        f"{run.verify_seconds:.2f}",
    )  # fmt: skip


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
