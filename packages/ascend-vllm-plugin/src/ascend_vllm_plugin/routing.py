"""The routing table: which backend serves which layers, and why not the others.

The worker writes it as JSON to the file named by `ASCEND_VLLM_ROUTING_FILE` once the model is
loaded, and logs it. The JSON holds the fields of the records below, plus `format`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs.validators import deep_iterable, instance_of, optional

from ascend_attn_backends import AscendFlashAttentionBackend, GateTerm, Verdict
from ascend_attn_ops import Refusal
from ascend_vllm_plugin.errors import RoutingFileError
from ascend_vllm_plugin.files import replacing

FORMAT = 2

_ARCHITECTURE = frozenset({"use_mla", "use_sparse", "use_compress"})
"""Parameters of a request that say which kind of attention a layer has."""


@attrs.frozen
class RoutingRow:
    """Layers of one kind.

    Attributes:
        role: `target` or `draft`: whose layers they are in speculative decoding.
        kind: for people, such as `target, full attention`.
        layers: names of the layers in vLLM.
        backend: name of the chosen backend.
        backend_class: its class in vLLM, as module.class.
        chosen_by: what decided: `selection`, or the option with which the user did.
        request: what the backends were asked, field by field.
        verdicts: what each backend of ours said; empty when nobody asked them.
        gate: how draft layers stand to each term of the draft gate; empty for the target's.
    """

    role: str = attrs.field(validator=instance_of(str))
    kind: str = attrs.field(validator=instance_of(str))
    layers: tuple[str, ...] = attrs.field(validator=deep_iterable(instance_of(str)))
    backend: str = attrs.field(validator=instance_of(str))
    backend_class: str = attrs.field(validator=instance_of(str))
    chosen_by: str = attrs.field(validator=instance_of(str))
    request: Mapping[str, Any] = attrs.field(validator=instance_of(dict))
    verdicts: tuple[Verdict, ...]
    gate: tuple[GateTerm, ...] = ()

    @property
    def relaxations(self) -> tuple[GateTerm, ...]:
        """Terms of the strict gate that a wide gate set aside for these layers."""
        if self.backend != AscendFlashAttentionBackend.name:
            return ()
        return tuple(term for term in self.gate if term.state == "relaxed")

    @property
    def strangers(self) -> tuple[str, ...]:
        """Backends for another kind of attention, whose further reasons say nothing."""
        return tuple(one.backend for one in self.verdicts if _other_architecture(one))


@attrs.frozen
class DraftPlans:
    """Plans of the draft flash backend: one per geometry and step, shared by layers.

    Attributes:
        layers: draft layers that use plans.
        per_step: different geometries among them, and so plans that a draft step builds.
        builds: plans built so far.
        hits: times that a plan was used again.
        evictions: plans dropped for want of room.
    """

    layers: int = attrs.field(validator=instance_of(int))
    per_step: int = attrs.field(validator=instance_of(int))
    builds: int = attrs.field(validator=instance_of(int))
    hits: int = attrs.field(validator=instance_of(int))
    evictions: int = attrs.field(validator=instance_of(int))

    def render(self) -> str:
        """One line for people."""
        return (
            f"draft plans: {self.per_step} per draft step for {self.layers} layers; "
            f"built {self.builds}, reused {self.hits}, dropped {self.evictions}"
        )


@attrs.frozen
class RoutingTable:
    """Routing of one model.

    Attributes:
        mode: `simulated`: the model runs on a CPU, with the decisions of an NPU; or the base of
            NPU mode and what it runs on, such as `standalone on emulated CANN`.
        profile: SoC that is simulated, or there.
        vllm: version of vLLM.
        model: name or folder of the model.
        speculation: method, drafter and number of draft tokens; None without.
        rows: one for each kind of layer.
        plans: plans of the draft layers; None where no layer uses any.
    """

    mode: str = attrs.field(validator=instance_of(str))
    profile: str = attrs.field(validator=instance_of(str))
    vllm: str = attrs.field(validator=instance_of(str))
    model: str = attrs.field(validator=instance_of(str))
    speculation: Mapping[str, Any] | None = attrs.field(validator=optional(instance_of(dict)))
    rows: tuple[RoutingRow, ...]
    plans: DraftPlans | None = None

    def to_json(self) -> str:
        """The table as JSON text."""
        return json.dumps({"format": FORMAT, **attrs.asdict(self)}, indent=1)

    def write(self, path: Path) -> None:
        """Write the table; a reader sees the whole file or none."""
        with replacing(path) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8")

    def render(self) -> str:
        """The table as text for a log or a terminal."""
        lines = [f"Ascend attention routing ({self.mode} {self.profile}, vLLM {self.vllm})"]
        lines.append(f"model: {self.model}")
        if self.speculation is not None:
            said = ", ".join(f"{name} {value}" for name, value in self.speculation.items())
            lines.append(f"speculation: {said}")
        for row in self.rows:
            lines += _render_row(row)
        if self.plans is not None:
            lines.append(self.plans.render())
        return "\n".join(lines)


def _render_row(row: RoutingRow) -> list[str]:
    layers = f"{len(row.layers)} layer{'s' * (len(row.layers) != 1)}"
    lines = [
        f"{row.kind}: {layers} -> {row.backend} ({row.backend_class}), chosen by {row.chosen_by}"
    ]
    strangers = row.strangers
    for verdict in row.verdicts:
        if verdict.accepted:
            lines.append(f"  {verdict.backend}: takes it")
        if verdict.backend == row.backend:
            lines += [f"    relaxed, {term.refusal()}" for term in row.relaxations]
        if verdict.backend not in strangers:
            lines += [f"  {verdict.backend}: refused, {refusal}" for refusal in verdict.refusals]
    if strangers:
        lines.append(f"  for other architectures: {', '.join(strangers)}")
    return lines


def _other_architecture(verdict: Verdict) -> bool:
    """Whether a backend computes another kind of attention."""
    return any(
        parameter in _ARCHITECTURE
        for refusal in verdict.refusals
        for parameter in refusal.parameter.split(", ")
    )


def read_routing(path: Path) -> RoutingTable:
    """Read a table that `RoutingTable.write` wrote.

    Raises:
        RoutingFileError: no such file, or it holds something else.
    """
    try:
        return parse_routing(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RoutingFileError(str(path), "there is no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RoutingFileError(str(path), str(error)) from error
    except (TypeError, KeyError, AttributeError) as error:
        reason = error.args[0] if error.args else error  # attrs adds its records
        raise RoutingFileError(str(path), f"a field is missing or wrong: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise RoutingFileError(str(path), str(error)) from error


def parse_routing(text: str) -> RoutingTable:
    """Read the text that `RoutingTable.to_json` gave.

    Raises:
        ValueError: it is no JSON, or of another format.
        TypeError, KeyError, AttributeError: a field is missing or wrong.
    """
    return _table(json.loads(text))


def _table(data: dict[str, Any]) -> RoutingTable:
    found = data.pop("format", None)
    if found != FORMAT:
        raise ValueError(f"its format is {found!r}, this version reads {FORMAT}")
    rows = tuple(_row(row) for row in data.pop("rows"))
    plans = data.pop("plans")
    return RoutingTable(**data, rows=rows, plans=None if plans is None else DraftPlans(**plans))


def _row(data: dict[str, Any]) -> RoutingRow:
    verdicts = tuple(
        Verdict(
            _read(str, verdict["backend"]),
            tuple(Refusal(**_texts(said)) for said in verdict["refusals"]),
        )
        for verdict in data.pop("verdicts")
    )
    gate = tuple(GateTerm(**_texts(term)) for term in data.pop("gate"))
    layers = tuple(data.pop("layers"))
    return RoutingRow(**data, layers=layers, verdicts=verdicts, gate=gate)


def _texts(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a refusal or a term of the gate; all but the code of CANN are text."""
    return {n: value if n == "cann_code" else _read(str, value) for n, value in fields.items()}


def _read(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
