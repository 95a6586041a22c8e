"""Progress and errors on standard error, so that standard output holds results only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
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
