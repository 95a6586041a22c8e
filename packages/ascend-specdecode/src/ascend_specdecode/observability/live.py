"""A table that shows an engine at work, for a terminal (rich)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ascend_specdecode.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ascend_specdecode.orchestrator.engine import DraftVerify

_REFRESHES = 4  # per second


@contextlib.contextmanager
def live_progress(engine: DraftVerify[Any], *, console: Console | None = None) -> Iterator[None]:
    """Show requests, tokens, acceptance and k while the block runs; erased when it ends.

    ``with live_progress(engine): ...`` inside the engine's own block. A thread of rich draws; the
    engine is only read.

    Args:
        engine: the engine.
        console: where to draw; by default standard output.

    Raises:
        MissingExtraError: rich is not installed.
    """
    try:
        from rich.live import Live
    except ImportError:
        raise MissingExtraError("live progress", "rich", "progress") from None
    start = time.monotonic()

    def now() -> Table:
        return progress_table(engine, time.monotonic() - start)

    live = Live(console=console, refresh_per_second=_REFRESHES, transient=True, get_renderable=now)
    with live:
        yield


def progress_table(engine: DraftVerify[Any], seconds: float) -> Table:
    """Return the table that :func:`live_progress` draws.

    Args:
        engine: the engine.
        seconds: how long it has been shown.
    """
    from rich import box
    from rich.table import Table

    load, counted, known = engine.load, engine.statistics, engine.speculation()
    rate = counted.generation_tokens / seconds if seconds else 0.0
    even = "-" if known.break_even is None else f"{known.break_even:.2f}"
    shares = " ".join(f"{share:.2f}" for share in counted.acceptance_per_position()) or "-"
    rows = {
        "requests": f"{load.running} running, {load.waiting} waiting, "
        f"{sum(counted.endings.values())} ended",
        "tokens": f"{counted.generation_tokens} ({rate:.1f} per second)",
        "acceptance length": f"{counted.acceptance_length:.2f}",
        "acceptance by position": shares,
        "k": f"{known.k} (break-even acceptance {even})",
        "drafts lost": str(counted.draft_errors + counted.draft_timeouts),
    }
    shown = Table(box=box.SIMPLE, show_header=False, title=f"{engine.config.mode} engine")
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown
