"""Writes docs/hardware.md from the data: ``python -m ascend_hwprofile.docs [--check] PATH``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ascend_hwprofile import catalog
from ascend_hwprofile.commands import figure_text, yes_no
from ascend_hwprofile.documents import peak_rates
from ascend_hwprofile.profile import HardwareProfile
from ascend_hwprofile.profiles import known_profiles, profile_for
from ascend_hwprofile.records import Figure
from ascend_hwprofile.soc import known_socs
from ascend_hwprofile.words import Capability, Confidence, Family

_MARKS = {
    Confidence.VENDOR: "",
    Confidence.DERIVED: " (d)",
    Confidence.PRESS: " (p)",
    Confidence.UNVERIFIED: " (?)",
}
_COLUMNS = ("cube_cores", "vector_cores", "clock_mhz", "memory_bytes", "l2_bytes")
_BUFFERS = ("ub_bytes", "l1_bytes", "l0a_bytes", "l0b_bytes", "l0c_bytes", "bt_bytes")
# One SoC for each column of the product tables.
_PRODUCTS = {
    "A2": "Ascend910B1",
    "A3": "Ascend910_9391",
    "950PR": "Ascend950PR_9599",
    "950DT": "Ascend950DT_9581",
    "310P": "Ascend310P3",
    "310B": "Ascend310B4",
}
_INTRODUCTION = """\
# Hardware

Generated from the data of `ascend-hwprofile`; do not edit. To bring it up to date run
`python -m ascend_hwprofile.docs docs/hardware.md`.

Marks: (d) derived, (p) press, (?) unverified, ? not stated by any source read.
"""


def render() -> str:
    """Return the whole page."""
    sections = (
        _INTRODUCTION,
        _families(),
        _socs(),
        _buffers(),
        _peaks(),
        _capabilities(),
        _operators(),
    )
    return "\n".join((*sections, _refused(), _sources()))


def _markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(name: str, figure: Figure | None) -> str:
    if figure is None:
        return "?"
    return figure_text(name, figure.value) + _MARKS[figure.confidence]


def _families() -> str:
    rows = [
        (
            table.family.value,
            table.title,
            "refused" if table.refusal else f"{table.default_soc}: {table.default_reason}",
            str(table.figures()["npu_arch"].value),
            table.toolchain_core,
            ", ".join(table.source_directories) or "-",
        )
        for table in map(catalog.family_table, Family)
    ]
    headers = ("family", "products", "default SoC", "NPU architecture", "toolchain core")
    text = _markdown((*headers, "build-tree directories"), rows)
    return f"## Families\n\n{text}"


def _socs() -> str:
    headers = ("SoC", "family", "runtime value", "cube", "vector", "clock", "memory", "L2", "HBM")
    names = (*_COLUMNS, "memory_bandwidth_gbps")
    rows = [
        (
            profile.soc_name,
            profile.family,
            str(profile.runtime_value),
            *(_cell(name, profile.figure(name)) for name in names),
        )
        for profile in known_profiles()
    ]
    return f"## SoCs\n\n{_markdown(headers, rows)}"


def _architectures() -> Iterator[HardwareProfile]:
    seen: set[int | None] = set()
    for name in _PRODUCTS.values():
        profile = profile_for(name)
        if profile.npu_arch not in seen:
            seen.add(profile.npu_arch)
            yield profile


def _buffers() -> str:
    rows = [
        (str(profile.npu_arch), *(_cell(name, profile.figure(name)) for name in _BUFFERS))
        for profile in _architectures()
    ]
    headers = ("NPU architecture", "UB", "L1", "L0A", "L0B", "L0C", "BT")
    return f"## On-core buffers\n\n{_markdown(headers, rows)}"


def _peaks() -> str:
    rows: list[Sequence[str]] = []
    for profile in known_profiles():
        rates = peak_rates(profile)
        if rates.get("float16") is not None:
            doubt = _MARKS[profile.figures["clock_mhz"].confidence]
            names = ("float16", "bfloat16", "int8", "float8_e4m3", "int4", "mxfp4")
            cells = (f"{rate:.1f}" if (rate := rates.get(name)) else "-" for name in names)
            rows.append((profile.soc_name + doubt, *cells))
    headers = ("SoC", "FP16", "BF16", "INT8", "FP8", "INT4", "MXFP4")
    formula = "10^12 dense operations per second: cube cores x 16 x 16 x K x 2 x clock.\n"
    return f"## Peak rates (derived)\n\n{formula}\n{_markdown(headers, rows)}"


def _capabilities() -> str:
    profiles = [profile_for(name) for name in _PRODUCTS.values()]
    titles = catalog.capability_table()
    rows = [
        (
            f"`{capability.name}`",
            titles[capability]["title"],
            *(yes_no(profile.supports(capability)) for profile in profiles),
        )
        for capability in Capability
    ]
    return f"## Capabilities\n\n{_markdown(('capability', 'meaning', *_PRODUCTS), rows)}"


def _operators() -> str:
    profiles = [profile_for(name) for name in _PRODUCTS.values()]
    rows: list[Sequence[str]] = []
    for name, row in catalog.operator_table().items():
        supports = [profile.operator(name) for profile in profiles]
        verdicts = (yes_no(one.supported) + _MARKS[one.confidence] for one in supports)
        rows.append((f"`{name}`", *verdicts, row.get("limits", "")))
    return f"## Attention operators\n\n{_markdown(('operator', *_PRODUCTS, 'limits'), rows)}"


def _refused() -> str:
    rows = [
        (soc.soc_name, str(soc.runtime_value or "-"), soc.refusal)
        for soc in known_socs()
        if soc.refusal is not None
    ]
    return f"## Recognised and refused\n\n{_markdown(('SoC', 'runtime value', 'reason'), rows)}"


def _sources() -> str:
    rows = [(row["title"], row["where"]) for row in catalog.read_table("sources").values()]
    return f"## Sources\n\n{_markdown(('document', 'where'), rows)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with ``--check`` say whether it is up to date (exit code 1 if not)."""
    parser = argparse.ArgumentParser(prog="python -m ascend_hwprofile.docs", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    options = parser.parse_args(arguments)
    path: Path = options.path
    wanted = render()
    if not options.check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted, encoding="utf8")
        return 0
    found = path.read_text(encoding="utf8") if path.exists() else None
    if found == wanted:
        return 0
    state = "does not exist" if found is None else "is not what the data give"
    print(f"{path} {state}; run: python -m ascend_hwprofile.docs {path}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
