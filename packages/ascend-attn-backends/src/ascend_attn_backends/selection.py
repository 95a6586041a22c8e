"""Choice of a backend, with every reason: a pure function of request and profile."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, ClassVar, Protocol

import attrs

from ascend_attn_ops import Refusal
from ascend_hwprofile import Capability, HardwareProfile

from .draft_gate import GateTerm, judge_draft_gate
from .errors import NoBackendError
from .request import BackendRequest

_TABLE_SOURCE = "ascend_attn_backends/backends.toml"


class AttentionBackend(Protocol):
    """What a backend class answers. It is never instantiated.

    Attributes:
        name: Its name in the table.
        metadata_class: What its builder builds: frozen, valid for one step.
        builder_class: ``build(batch)`` makes the metadata of a step.
        impl_class: Attention of one layer: ``write_kv`` and ``forward``.
    """

    name: ClassVar[str]
    metadata_class: ClassVar[type[Any]]
    builder_class: ClassVar[type[Any]]
    impl_class: ClassVar[type[Any]]

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why the backend does not take the request; empty when it does."""
        ...


@attrs.frozen
class Verdict:
    """One backend's answer.

    Attributes:
        backend: Name of the backend.
        refusals: Its reasons; empty when it takes the request.
    """

    backend: str
    refusals: tuple[Refusal, ...]

    @property
    def accepted(self) -> bool:
        """Whether the backend takes the request."""
        return not self.refusals


@attrs.frozen
class Selection:
    """The chosen backend and the verdict of every backend of this version.

    Attributes:
        request: What was asked.
        soc_name: Product that it was judged for.
        architecture: Name of the layer's architecture, or None for an unknown combination.
        backend: Name of the first backend that takes the request, or None.
        verdicts: One per backend, in order of preference: the draft backend, then the table.
        architecture_refusals: Why this version or this product cannot run the architecture at all.
        gate: How the request stands to each term of the draft gate.
    """

    request: BackendRequest
    soc_name: str
    architecture: str | None
    backend: str | None
    verdicts: tuple[Verdict, ...]
    architecture_refusals: tuple[Refusal, ...] = ()
    gate: tuple[GateTerm, ...] = ()

    @property
    def relaxations(self) -> tuple[GateTerm, ...]:
        """Terms of the strict gate that the choice sets aside; only the wide gate has any."""
        if self.backend not in gated_backends():
            return ()
        return tuple(term for term in self.gate if term.state == "relaxed")

    @property
    def backend_class(self) -> type[AttentionBackend]:
        """Class of the chosen backend.

        Raises:
            NoBackendError: No backend takes the request; the message is :meth:`as_text`.
        """
        if self.backend is None:
            raise NoBackendError(self.as_text())
        return backend_classes()[self.backend]

    def as_text(self) -> str:
        """A table for people: one line per backend, one per reason below it."""
        layer = f"{self.request.role} layer, {self.architecture or 'unknown architecture'}"
        lines = [f"{layer}, on {self.soc_name}: {self.backend or 'no backend'}"]
        lines += [f"  {refusal}" for refusal in self.architecture_refusals]
        width = max(len(verdict.backend) for verdict in self.verdicts)
        for verdict in self.verdicts:
            chosen = verdict.backend == self.backend
            state = "chosen" if chosen else "accepted" if verdict.accepted else "refused"
            lines.append(f"  {verdict.backend:<{width}}  {state}")
            lines += [f"  {'':<{width}}    {refusal}" for refusal in verdict.refusals]
            if chosen:
                lines += [
                    f"  {'':<{width}}    relaxed: {term.refusal()}" for term in self.relaxations
                ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The selection as plain data that ``json.dumps`` takes."""
        return {
            "role": self.request.role,
            "kind": self.architecture,
            "profile": self.soc_name,
            "backend": self.backend,
            "architecture_refusals": [entry.as_dict() for entry in self.architecture_refusals],
            "verdicts": [
                {
                    "backend": verdict.backend,
                    "refusals": [entry.as_dict() for entry in verdict.refusals],
                }
                for verdict in self.verdicts
            ],
            "relaxations": [term.refusal().as_dict() for term in self.relaxations],
        }


def select_backend(request: BackendRequest, profile: HardwareProfile) -> Selection:
    """Ask every backend of this version and take the first that accepts.

    The draft backend comes first: it takes what passes :func:`judge_draft_gate` and its operator's
    contract. For everything else the table decides as if there were no draft backend.

    Args:
        request: The layer.
        profile: Product that it runs on.

    Returns:
        The selection with all verdicts; its ``backend`` is None when every backend refuses.
    """
    verdicts = tuple(
        Verdict(name, tuple(backend.refusals(request, profile)))
        for name, backend in backend_classes().items()
    )
    entry = _architecture(request.use_mla, request.use_sparse, request.use_compress)
    return Selection(
        request=request,
        soc_name=profile.soc_name,
        architecture=None if entry is None else entry["name"],
        backend=next((verdict.backend for verdict in verdicts if verdict.accepted), None),
        verdicts=verdicts,
        architecture_refusals=tuple(_architecture_refusals(entry, request, profile)),
        gate=judge_draft_gate(request, profile),
    )


def get_attn_backend_cls(
    use_mla: bool = False, use_sparse: bool = False, use_compress: bool = False
) -> type[AttentionBackend]:
    """The plain table: architecture flags to backend class, without a product's limits.

    Raises:
        NoBackendError: The flags name no architecture, or this version has no backend for it.
    """
    entry = _architecture(use_mla, use_sparse, use_compress)
    if entry is not None:
        for row in _rows_of_the_table():
            if row["architecture"] == entry["name"]:
                return backend_classes()[row["name"]]
    flags = f"use_mla={use_mla}, use_sparse={use_sparse}, use_compress={use_compress}"
    raise NoBackendError(f"attention architecture: found {flags}; allowed: {_known_flags()}")


@cache
def backend_classes() -> Mapping[str, type[AttentionBackend]]:
    """The backends of this version by name, in order of preference."""
    rows = sorted(_table()["backend"], key=lambda row: not row.get("before_table", False))
    return {row["name"]: _load(row["class"]) for row in rows}


def gated_backends() -> frozenset[str]:
    """Names of the backends that are asked before the table."""
    return frozenset(row["name"] for row in _table()["backend"] if row.get("before_table"))


def _rows_of_the_table() -> list[Mapping[str, Any]]:
    return [row for row in _table()["backend"] if not row.get("before_table")]


def unmet_demands(name: str, request: BackendRequest) -> list[Refusal]:
    """Refusals that follow from the table alone: architecture flags and features.

    Args:
        name: Backend whose entry of the table is read.
        request: The layer.
    """
    row = _row(name)
    entry = next(e for e in _table()["architecture"] if e["name"] == row["architecture"])
    demands = [
        {"parameter": flag, "values": [entry[flag]], "source": _TABLE_SOURCE}
        for flag in ("use_mla", "use_sparse", "use_compress")
        if flag in entry
    ]
    return [
        Refusal(
            rule=f"{name}.{demand['parameter']}",
            parameter=demand["parameter"],
            found=str(getattr(request, demand["parameter"])),
            allowed=_allowed(demand),
            source=demand["source"],
        )
        for demand in [*demands, *_demands(row)]
        if not _within(getattr(request, demand["parameter"]), demand)
    ]


def _row(name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(row for row in _table()["backend"] if row["name"] == name)
    return found


def _demands(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Its own demands first; those of others only for parameters that it does not name."""
    others = _demands(_row(row["like"])) if "like" in row else _table()["every_backend_takes"]
    own = {demand["parameter"] for demand in row["takes"]}
    return [*row["takes"], *(other for other in others if other["parameter"] not in own)]


def _allowed(demand: Mapping[str, Any]) -> str:
    if "at_least" in demand:
        return f"at least {demand['at_least']}"
    return " or ".join(str(value) for value in demand["values"]) or "None"


def _within(value: Any, demand: Mapping[str, Any]) -> bool:
    """Whether a value is allowed; an empty list of values allows only None."""
    if "at_least" in demand:
        return bool(value >= demand["at_least"])
    values = demand["values"]
    return value in values if values else value is None


def _architecture_refusals(
    entry: Mapping[str, Any] | None, request: BackendRequest, profile: HardwareProfile
) -> list[Refusal]:
    if entry is None:
        flags = (request.use_mla, request.use_sparse, request.use_compress)
        return [_refusal("architecture", "use_mla, use_sparse, use_compress", str(flags))]
    refusals = []
    why_not = profile.why_not(Capability[entry["capability"]]) if "capability" in entry else None
    if why_not is not None:
        refusals.append(
            Refusal(
                rule="table.capability",
                parameter="profile",
                found=why_not,
                allowed=f"a product with {entry['capability']}",
                source="ascend_hwprofile",
            )
        )
    return refusals


def _refusal(rule: str, parameter: str, found: str) -> Refusal:
    return Refusal(f"table.{rule}", parameter, found, _known_flags(), _TABLE_SOURCE)


def _known_flags() -> str:
    built = dict.fromkeys(row["architecture"] for row in _rows_of_the_table())
    return "an architecture that this version has a backend for: " + ", ".join(built)


def _architecture(use_mla: bool, use_sparse: bool, use_compress: bool) -> Mapping[str, Any] | None:
    flags = {"use_mla": use_mla, "use_sparse": use_sparse, "use_compress": use_compress}
    for entry in _table()["architecture"]:
        if all(entry.get(flag, value) == value for flag, value in flags.items()):
            found: Mapping[str, Any] = entry
            return found
    return None


@cache
def _table() -> Mapping[str, Any]:
    text = resources.files(__package__).joinpath("backends.toml").read_text("utf-8")
    return tomllib.loads(text)


def _load(path: str) -> type[AttentionBackend]:
    module, name = path.split(":")
    loaded: type[AttentionBackend] = getattr(importlib.import_module(module), name)
    return loaded
