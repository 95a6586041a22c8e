"""What demo 2 found: one outcome per way of serving, printed with rich or written as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ascend_demo.chat import Answer
from ascend_demo.glm import Variant
from ascend_demo.metrics import Speculation
from ascend_demo.report import answer_dict, chosen_table, ran_on

if TYPE_CHECKING:
    from ascend_attn_backends import GateTerm
    from ascend_vllm_plugin import RoutingRow, RoutingTable

NOTES: Final = (
    "simulated: this ran on a CPU, judged as the named product; nothing here ran on an NPU",
    "tiny-model figures say nothing about GLM-5: neither acceptance nor time",
)
_STYLES: Final = {"holds": "green", "relaxed": "yellow", "broken": "red"}


@attrs.frozen
class Outcome:
    """What serving one variant gave.

    Attributes:
        variant: how the target was served.
        seconds_to_ready: from starting the server to its first healthy answer.
        answers: one for each prompt.
        steps: steps of the engine for all requests, the warm-up included.
        routing: what the plugin decided, with the plans of the whole run.
    """

    variant: Variant
    seconds_to_ready: float
    answers: tuple[Answer, ...]
    steps: int
    routing: RoutingTable

    @property
    def speculation(self) -> Speculation:
        """Counters of all answers together."""
        counted = [answer.speculation for answer in self.answers]
        positions = zip(*(one.accepted_per_position for one in counted), strict=True)
        return Speculation(
            drafts=sum(one.drafts for one in counted),
            draft_tokens=sum(one.draft_tokens for one in counted),
            accepted_tokens=sum(one.accepted_tokens for one in counted),
            accepted_per_position=tuple(map(sum, positions)),
        )

    @property
    def seconds_per_token(self) -> float:
        """Seconds per output token after the first one, mean over the answers."""
        return sum(answer.seconds_per_token for answer in self.answers) / len(self.answers)

    def texts_like(self, other: Outcome) -> int:
        """How many answers have the very text that `other` has."""
        pairs = zip(self.answers, other.answers, strict=True)
        return sum(ours.text == theirs.text for ours, theirs in pairs)

    def to_dict(self, first: Outcome) -> dict[str, Any]:
        """Return the outcome as JSON types; texts are compared with those of `first`."""
        counted = self.speculation
        plans = self.routing.plans
        return {
            "variant": attrs.asdict(self.variant),
            "seconds_to_ready": self.seconds_to_ready,
            "seconds_per_token": self.seconds_per_token,
            "acceptance_length": counted.acceptance_length,
            "acceptance_per_position": list(counted.acceptance_per_position),
            "same_texts": self.texts_like(first),
            "steps": self.steps,
            "plans": None if plans is None else attrs.asdict(plans),
            "answers": [answer_dict(answer) for answer in self.answers],
            "routing": json.loads(self.routing.to_json()),
            "gate": {
                row.kind: [attrs.asdict(term) for term in gate_of(row, self.routing.profile)]
                for row in self.routing.rows
            },
        }


def report(outcomes: tuple[Outcome, ...], versions: Mapping[str, str]) -> dict[str, Any]:
    """Everything one run of the demo found, as JSON types."""
    return {
        "ran_on": ran_on(outcomes[0].routing),
        "notes": list(NOTES),
        "versions": dict(versions),
        "outcomes": [outcome.to_dict(outcomes[0]) for outcome in outcomes],
    }


def gate_of(row: RoutingRow, profile: str) -> tuple[GateTerm, ...]:
    """Every term of the draft gate for the layers of a row; the target's are judged here.

    The plugin keeps the terms of draft layers alone. Layers that nobody asked about have none.
    """
    if row.gate or not row.request:
        return row.gate
    import torch

    from ascend_attn_backends import BackendRequest, judge_draft_gate
    from ascend_hwprofile import profile_for

    fields = {**row.request, "dtype": getattr(torch, row.request["dtype"])}
    return judge_draft_gate(BackendRequest(**fields), profile_for(profile))


def show_routing(routing: RoutingTable, console: Console) -> None:
    """Print who serves which layers, and what the draft gate says to each kind of layer."""
    console.print(chosen_table(routing))
    for table in gate_tables(routing):
        console.print(table)


def gate_tables(routing: RoutingTable) -> list[Table]:
    """The gate for each kind of layer that was asked about: one row per term."""
    gates = {row.kind: gate_of(row, routing.profile) for row in routing.rows}
    return [_gate_table(kind, terms) for kind, terms in gates.items() if terms]


def _gate_table(kind: str, terms: tuple[GateTerm, ...]) -> Table:
    broken = sum(term.broken for term in terms)
    verdict = f"refused by {broken} term{'s' * (broken != 1)}" if broken else "taken"
    table = Table(title=f"Draft gate for: {kind} ({verdict})", title_justify="left")
    for column in ("", "what must hold", "verdict", "found", "allowed"):
        table.add_column(column, overflow="fold")
    numbers: dict[str, int] = {}
    for term in terms:
        numbers[term.kind] = numbers.get(term.kind, 0) + 1
        state = f"[{_STYLES[term.state]}]{term.state}[/]"
        name = f"{term.kind} {numbers[term.kind]}"
        table.add_row(name, escape(term.title), state, escape(term.found), escape(term.allowed))
    return table


def show(outcomes: tuple[Outcome, ...], console: Console) -> None:
    """Print what the variants compare to; their routing was shown while they ran."""
    for table in (acceptance_table(outcomes), plan_table(outcomes), time_table(outcomes)):
        console.print(table)
    for note in NOTES:
        console.print(note, style="bold", markup=False, highlight=False, soft_wrap=True)


def acceptance_table(outcomes: tuple[Outcome, ...]) -> Table:
    """Share of the drafts accepted at each position."""
    most = max(len(outcome.speculation.accepted_per_position) for outcome in outcomes)
    title = "Drafts: share accepted at each position (length counts the target's own token)"
    table = Table(title=title, title_justify="left")
    table.add_column("served with", overflow="fold")
    positions = [f"pos {position + 1}" for position in range(most)]
    for column in ("drafts", "drafted", "accepted", "length", *positions):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        counted = outcome.speculation
        length = counted.acceptance_length
        table.add_row(
            escape(outcome.variant.title),
            str(counted.drafts),
            str(counted.draft_tokens),
            str(counted.accepted_tokens),
            "no drafts" if length is None else f"{length:.2f}",
            *(f"{share:.0%}" for share in counted.acceptance_per_position),
        )
    return table


def plan_table(outcomes: tuple[Outcome, ...]) -> Table:
    """Plans of the draft backend beside the steps of the engine."""
    title = "Plans of the draft backend, and steps of the engine (warm-up included)"
    table = Table(title=title, title_justify="left")
    table.add_column("served with", overflow="fold")
    for column in ("engine steps", "draft layers", "plans a step", "built", "reused", "dropped"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        plans = outcome.routing.plans
        cells = ["no plans"] + [""] * 4
        if plans is not None:
            numbers = (plans.layers, plans.per_step, plans.builds, plans.hits, plans.evictions)
            cells = list(map(str, numbers))
        table.add_row(escape(outcome.variant.title), str(outcome.steps), *cells)
    return table


def time_table(outcomes: tuple[Outcome, ...]) -> Table:
    """Time per output token, beside that of the first variant."""
    first = outcomes[0]
    table = Table(title="Time per output token after the first", title_justify="left")
    table.add_column("served with", overflow="fold")
    for column in ("ms a token", f"of {first.variant.name}", "same texts"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        table.add_row(
            escape(outcome.variant.title),
            f"{1000 * outcome.seconds_per_token:.1f}",
            f"{outcome.seconds_per_token / first.seconds_per_token:.2f}",
            f"{outcome.texts_like(first)} of {len(outcome.answers)}",
        )
    return table
