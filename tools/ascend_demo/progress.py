"""Progress and errors on standard error, so that standard output holds results only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ascend_demo.gguf_to_hf import Advance
from ascend_demo.model import Tell


def error_console() -> Console:
    """Make a console on standard error; wide enough that paths are not broken in a log file."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = 200
    return console


def print_error(message: str) -> None:
    """Print one error message; file names in it are not taken for markup."""
    console = error_console()
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False, soft_wrap=True)


@contextmanager
def conversion_progress() -> Iterator[tuple[Tell, Advance]]:
    """Show what is being done, and a bar while tensors are converted."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=error_console()) as progress:
        bar = progress.add_task("tensors", total=None, visible=False)

        def tell(line: str) -> None:
            progress.console.print(line, markup=False)

        def advance(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, visible=True)

        yield tell, advance


class StartingProgress:
    """One line that says how long the server has been starting, and what it logged last."""

    def __init__(self) -> None:
        self._status = error_console().status("starting vLLM")
        self._status.start()

    def update(self, seconds: float, line: str) -> None:
        """Show the seconds waited and the last line of the log."""
        self._status.update(f"starting vLLM, {seconds:.0f} s: {escape(line[:160])}")

    def stop(self) -> None:
        """Take the line away; it may be called again."""
        self._status.stop()


@contextmanager
def starting_progress() -> Iterator[StartingProgress]:
    """Show that the server starts until it is stopped, at the latest when the block is left."""
    progress = StartingProgress()
    try:
        yield progress
    finally:
        progress.stop()
