"""What the demo found: printed with rich, or written as JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ascend_demo.chat import Answer

if TYPE_CHECKING:
    from ascend_vllm_plugin import RoutingRow, RoutingTable


@attrs.frozen
class Report:
    """Everything one run of the demo found.

    Attributes:
        model: the model folder.
        url: where the server listened.
        seconds_to_ready: from starting the server to its first healthy answer.
        routing: what the plugin decided, as the plugin wrote it.
        answers: one for each request.
        versions: of the distributions the server ran on.
    """

    model: Path
    url: str
    seconds_to_ready: float
    routing: RoutingTable
    answers: tuple[Answer, ...]
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            "model": str(self.model),
            "url": self.url,
            "seconds_to_ready": self.seconds_to_ready,
            "ran_on": ran_on(self.routing),
            "routing": json.loads(self.routing.to_json()),
            "answers": [answer_dict(answer) for answer in self.answers],
            "versions": dict(self.versions),
        }

    def write(self, path: Path) -> None:
        """Write the report as JSON; a reader sees the whole file or none."""
        write_json(path, self.to_dict())


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON; a reader sees the whole file or none."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2)
            file.write("\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def ran_on(routing: RoutingTable) -> str:
    """Say where the model ran, in words that cannot be taken for a test on an NPU."""
    from ascend_hwprofile import profile_for

    family = profile_for(routing.profile).family.value
    return f"{routing.mode} {family} on CPU"


def answer_dict(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON types, with what follows from it."""
    speculation = answer.speculation
    return {
        **attrs.asdict(answer),
        "tokens_per_second": answer.tokens_per_second,
        "acceptance_length": speculation.acceptance_length,
        "acceptance_per_position": list(speculation.acceptance_per_position),
    }


def show(report: Report, console: Console) -> None:
    """Print the tables; the answers themselves were shown while they were streamed."""
    for table in routing_tables(report.routing):
        console.print(table)
    console.print(request_table(report.answers))
    console.print(acceptance_table(report.answers))
    console.print(place_table(report))


def routing_tables(routing: RoutingTable) -> Iterator[Table]:
    """Which backend serves which layers, then why each other one was refused."""
    yield chosen_table(routing)
    for row in routing.rows:
        yield _refusal_table(row)


def chosen_table(routing: RoutingTable) -> Table:
    """Which backend serves which layers."""
    chosen = Table(title=f"Routing ({ran_on(routing)}, {routing.profile})", title_justify="left")
    for column in ("layer kind", "layers", "backend", "chosen by"):
        chosen.add_column(column, overflow="fold")
    for row in routing.rows:
        cells = (row.kind, str(len(row.layers)), row.backend, row.chosen_by)
        chosen.add_row(*map(escape, cells))
    return chosen


def _refusal_table(row: RoutingRow) -> Table:
    table = Table(title=f"Why not another backend for: {row.kind}", title_justify="left")
    for column in ("backend", "what", "found", "allowed", "says"):
        table.add_column(column, overflow="fold")
    for verdict in row.verdicts:
        name = verdict.backend
        if name in row.strangers:
            continue
        if verdict.accepted:
            table.add_row(escape(name), "[green]takes it[/]")
        for refusal in verdict.refusals:
            cells = (name, refusal.parameter, refusal.found, refusal.allowed, refusal.source)
            table.add_row(*map(escape, cells))
            name = ""
        table.add_section()
    if row.strangers:
        table.add_row(escape(", ".join(row.strangers)), "other architectures")
    return table


def request_table(answers: tuple[Answer, ...]) -> Table:
    """Tokens and times of each request."""
    table = Table(title="Requests", title_justify="left")
    for column in ("request", "prompt tokens", "tokens", "first token", "tokens/s", "ended by"):
        table.add_column(column, justify="left" if column == "request" else "right")
    for answer in answers:
        table.add_row(
            escape(answer.question.name),
            str(answer.prompt_tokens),
            str(answer.tokens),
            f"{answer.seconds_to_first_token:.2f} s",
            f"{answer.tokens_per_second:.1f}",
            escape(answer.finish_reason),
        )
    return table


def acceptance_table(answers: tuple[Answer, ...]) -> Table:
    """How much of what was drafted the target accepted."""
    most = max((len(a.speculation.accepted_per_position) for a in answers), default=0)
    title = "n-gram drafts: share accepted at each position (length counts the target's own token)"
    table = Table(title=title, title_justify="left")
    positions = [f"pos {position + 1}" for position in range(most)]
    for column in ("request", "drafts", "drafted", "accepted", "length", *positions):
        table.add_column(column, justify="left" if column == "request" else "right")
    for answer in answers:
        counted = answer.speculation
        length = counted.acceptance_length
        table.add_row(
            escape(answer.question.name),
            str(counted.drafts),
            str(counted.draft_tokens),
            str(counted.accepted_tokens),
            "no drafts" if length is None else f"{length:.2f}",
            *(f"{share:.0%}" for share in counted.acceptance_per_position),
        )
    return table


def place_table(report: Report) -> Table:
    """What ran where."""
    routing = report.routing
    table = Table(title="What ran where", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    providers = sorted({str(row.request.get("provider")) for row in routing.rows})
    backends = sorted({row.backend_class for row in routing.rows})
    speculation = routing.speculation or {}
    rows = {
        "hardware": f"{ran_on(routing)} ({routing.profile}); nothing here ran on an NPU",
        "engine": f"vLLM {routing.vllm}, OpenAI server, ready in {report.seconds_to_ready:.0f} s",
        "attention": ", ".join(backends),
        "operators": f"ascend-attn-ops, provider {', '.join(providers)}",
        "drafter": ", ".join(f"{name} {value}" for name, value in speculation.items()),
        "model": str(report.model),
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table
