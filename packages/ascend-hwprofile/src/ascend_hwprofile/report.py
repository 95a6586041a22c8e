"""What a command prints, apart from how: tables, lines and the JSON of the same content."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

import attrs

_GAP = "  "


@attrs.frozen(eq=False, repr=False)
class Table:
    """A table with a title. Every row has one text for each header."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@attrs.frozen(eq=False, repr=False)
class Report:
    """The result of one command.

    ``error`` goes to standard error; ``document`` is what ``--json`` prints.
    """

    document: Mapping[str, object]
    parts: tuple[Table | str, ...] = ()
    error: str | None = None
    exit_code: int = 0


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Make a table of anything; None shows as ``?``."""
    shown = tuple(tuple("?" if cell is None else str(cell) for cell in row) for row in rows)
    return Table(title, tuple(headers), shown)


def write(report: Report, *, as_json: bool) -> None:
    """Print a report: JSON if asked for, rich tables on a terminal, else plain columns."""
    out = sys.stdout
    if as_json:
        import json

        json.dump(report.document, out, indent=2)
        out.write("\n")
    elif not (out.isatty() and _write_rich(report, out)):
        _write_plain(report, out)
    if report.error is not None:
        print(f"ascend-hwprofile: {report.error}", file=sys.stderr)


def _write_plain(report: Report, out: TextIO) -> None:
    for number, part in enumerate(report.parts):
        if number:
            out.write("\n")
        out.write(f"{part}\n" if isinstance(part, str) else _plain(part))


def _plain(part: Table) -> str:
    lines = [part.headers, *part.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(part.headers))]
    text = [_GAP.join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([f"{part.title}:", *text, ""])


def _write_rich(report: Report, out: TextIO) -> bool:
    """Print with rich; return False where it is not installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        return False
    console = Console(file=out)
    for part in report.parts:
        if isinstance(part, str):
            console.print(Text(part))
            continue
        shown = RichTable(
            title=part.title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for position, header in enumerate(part.headers):
            # The name in the first column must stay whole, so that it can be copied.
            shown.add_column(header, overflow="fold", no_wrap=position == 0)
        for row in part.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)
    return True
