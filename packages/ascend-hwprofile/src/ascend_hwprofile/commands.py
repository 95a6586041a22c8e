"""The commands that answer from the data: each returns a report and prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ascend_hwprofile import documents
from ascend_hwprofile.errors import HwProfileError
from ascend_hwprofile.profile import HardwareProfile
from ascend_hwprofile.profiles import profile_for
from ascend_hwprofile.records import Figure, OperatorSupport
from ascend_hwprofile.report import Report, Table, table
from ascend_hwprofile.soc import SocId, find_entry, known_socs
from ascend_hwprofile.words import Capability

_SCALARS = (
    "npu_arch",
    "cube_cores",
    "vector_cores",
    "clock_mhz",
    "memory_bytes",
    "l2_bytes",
)
_IDENTITY = (
    "family",
    "product",
    "runtime_value",
    "toolchain_core",
    "die_pair",
    "virtual_slices",
    "note",
)


def size_text(count: int | float | None) -> str:
    """Return a number of bytes in the largest unit that divides it."""
    if count is None:
        return "?"
    for unit, factor in (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor and count % factor == 0:
            return f"{int(count // factor)} {unit}"
    return f"{count} B"


def figure_text(name: str, value: int | float | None) -> str:
    """Return a figure with its unit."""
    if name.endswith("_bytes"):
        return size_text(value)
    unit = {"mhz": " MHz", "gbps": " GB/s"}.get(name.rsplit("_", 1)[-1], "")
    return "?" if value is None else f"{value}{unit}"


def yes_no(supported: bool | None) -> str:
    """Return a verdict as a word."""
    return {True: "yes", False: "no", None: "unknown"}[supported]


def list_socs(family: str | None) -> Report:
    """List every SoC of the data, refused ones included."""
    socs = [soc for soc in known_socs() if family is None or soc.family == family]
    rows = [_list_row(soc) for soc in socs]
    headers = ("SoC", "family", "value", "cube", "vector", "clock", "memory", "L2", "status")
    document = {**documents.header("list"), "socs": [documents.of_soc(soc) for soc in socs]}
    return Report(document, (table("Ascend SoCs", headers, rows),))


def _list_row(soc: SocId) -> Sequence[object]:
    figures = find_entry(soc.soc_name).figures()
    names = ("cube_cores", "vector_cores", "clock_mhz", "memory_bytes", "l2_bytes")
    shown = [figure_text(name, figures[name].value if name in figures else None) for name in names]
    status = "ok" if soc.refusal is None else "refused"
    return (soc.soc_name, soc.family or "-", soc.runtime_value or "-", *shown, status)


def show(soc: str) -> Report:
    """Show everything known about one SoC or a family's default SoC."""
    profile = profile_for(soc)
    document = {**documents.header("show"), **documents.of_profile(profile)}
    identity = [(name, getattr(profile, name)) for name in _IDENTITY]
    parts = (
        table(profile.soc_name, ("what", "value"), identity),
        _figure_table(profile),
        _dtype_table(profile),
        _capability_table(profile),
        _operator_table(profile.operators.values()),
    )
    return Report(document, parts)


def _figure_table(profile: HardwareProfile) -> Table:
    names = dict.fromkeys((*_SCALARS, *profile.figures))
    rows = [_figure_row(name, profile.figure(name)) for name in names]
    return table("Figures", ("figure", "value", "confidence", "source", "note"), rows)


def _figure_row(name: str, figure: Figure | None) -> Sequence[str]:
    if figure is None:
        return (name, "?", "-", "-", "no source read states it")
    others = [f"{figure_text(name, one.value)} in {one.source}" for one in figure.alternatives]
    note = "; ".join(filter(None, (figure.note, ", ".join(others))))
    value = figure_text(name, figure.value)
    return (name, value, figure.confidence, figure.source, note)


def _dtype_table(profile: HardwareProfile) -> Table:
    rates = documents.peak_rates(profile)
    rows = [
        (name, yes_no(one.supported), rates.get(name, "-"), one.confidence, one.note)
        for name, one in profile.dtype_support.items()
    ]
    headers = ("dtype", "supported", "peak Tera-op/s", "confidence", "note")
    return table("Cube unit", headers, rows)


def _capability_table(profile: HardwareProfile) -> Table:
    rows = [
        (capability, yes_no(profile.supports(capability)), profile.missing.get(capability, ""))
        for capability in Capability
    ]
    return table("Capabilities", ("capability", "supported", "why not"), rows)


def _operator_table(operators: Iterable[OperatorSupport]) -> Table:
    rows = [
        (one.name, yes_no(one.supported), one.confidence, one.source, one.reason)
        for one in operators
    ]
    return table("Operators", ("operator", "supported", "confidence", "source", "reason"), rows)


def why(soc: str, names: Sequence[str]) -> Report:
    """Say for each capability or operator whether a SoC has it, and if not, why."""
    profile = profile_for(soc)
    answers = [_answer(profile, name) for name in names]
    document = {
        **documents.header("why"),
        "soc_name": profile.soc_name,
        "answers": [
            {"name": name, "kind": kind, "supported": supported, "reason": reason}
            for name, kind, supported, reason in answers
        ],
    }
    lines = tuple(
        f"{kind} {name} on {profile.soc_name} ({profile.family}): {yes_no(supported)}"
        f"{f': {reason}' if reason else ''}"
        for name, kind, supported, reason in answers
    )
    return Report(document, ("\n".join(lines),))


def _answer(profile: HardwareProfile, name: str) -> tuple[str, str, bool | None, str]:
    wanted = name.strip().lower().removeprefix("npu_")
    if wanted in profile.operators:
        one = profile.operator(wanted)
        said = f"{one.reason} [{one.source}, {one.confidence}]".strip()
        return wanted, "operator", one.supported, said
    if wanted not in set(Capability):
        raise HwProfileError(
            f"unknown operator or capability {name!r}; operators: {', '.join(profile.operators)}; "
            f"capabilities: {', '.join(Capability)}"
        )
    reason = profile.why_not(Capability(wanted)) or ""
    return wanted, "capability", not reason, reason


def diff(left: str, right: str) -> Report:
    """Compare two SoCs or families."""
    one, other = profile_for(left), profile_for(right)
    figures, operators = _figures_that_differ(one, other), _operators_that_differ(one, other)
    document = {
        **documents.header("diff"),
        "left": one.soc_name,
        "right": other.soc_name,
        "figures": {name: {"left": mine, "right": theirs} for name, mine, theirs in figures},
        "left_lacks": _lacks(one, other),
        "right_lacks": _lacks(other, one),
        "operators": {name: {"left": mine, "right": theirs} for name, mine, theirs in operators},
    }
    sides = (one.soc_name, other.soc_name)
    shown = [(name, figure_text(name, a), figure_text(name, b)) for name, a, b in figures]
    verdicts = [(name, yes_no(a), yes_no(b)) for name, a, b in operators]
    parts = (
        table("Figures that differ", ("figure", *sides), shown),
        _lacking_table(one, other),
        _lacking_table(other, one),
        table("Operators that differ", ("operator", *sides), verdicts),
    )
    return Report(document, parts)


def _figures_that_differ(
    one: HardwareProfile, other: HardwareProfile
) -> list[tuple[str, int | float | None, int | float | None]]:
    names = dict.fromkeys((*_SCALARS, *one.figures, *other.figures))
    values = [(name, _value(one, name), _value(other, name)) for name in names]
    return [row for row in values if row[1] != row[2]]


def _operators_that_differ(
    one: HardwareProfile, other: HardwareProfile
) -> list[tuple[str, bool | None, bool | None]]:
    verdicts = [
        (name, one.operators[name].supported, other.operators[name].supported)
        for name in one.operators
    ]
    return [row for row in verdicts if row[1] != row[2]]


def _value(profile: HardwareProfile, name: str) -> int | float | None:
    figure = profile.figure(name)
    return None if figure is None else figure.value


def _lacks(one: HardwareProfile, other: HardwareProfile) -> dict[str, dict[str, str]]:
    """Return what ``one`` lacks and ``other`` has, with the reason."""
    abilities = sorted(other.capabilities - one.capabilities)
    dtypes = sorted(other.dtypes - one.dtypes)
    return {
        "capabilities": {name: one.missing[name] for name in abilities},
        "dtypes": {name: one.dtype_support[name].note for name in dtypes},
    }


def _lacking_table(one: HardwareProfile, other: HardwareProfile) -> Table:
    lacks = _lacks(one, other)
    rows = [*lacks["capabilities"].items()]
    rows += [(f"dtype {name}", note) for name, note in lacks["dtypes"].items()]
    title = f"What {one.soc_name} cannot do and {other.soc_name} can"
    return table(title, ("ability", "why not"), rows)


def refused(command: str, error: HwProfileError) -> Report:
    """Report an unknown or refused SoC."""
    document = {**documents.header(command), "error": str(error), "kind": type(error).__name__}
    return Report(document, (), str(error), 1)
