"""Reads the TOML data, once and only when asked for."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import attrs

from ascend_hwprofile.records import Alternative, DtypeSupport, FeatureSupport, Figure
from ascend_hwprofile.words import Confidence, Family

Table = Mapping[str, Any]

_FAMILY_FILES = {
    Family.A2: "a2",
    Family.A3: "a3",
    Family.A5: "a5",
    Family.ATLAS_310P: "310p",
    Family.ATLAS_310B: "310b",
    Family.GEN1: "gen1",
}
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB": 10**9}


@attrs.frozen
class OpenName:
    """A naming pattern of bins that are not in the data."""

    pattern: re.Pattern[str]
    canonical: str
    product: str | None
    pre_release: bool


@attrs.frozen
class FamilyTable:
    """What one family file says about the whole family."""

    family: Family
    title: str
    products: tuple[str, ...]
    default_soc: str
    default_reason: str
    stems: tuple[str, ...]
    toolchain_core: str
    die_pair: bool
    refusal: str | None
    shared_runtime_value: int | None
    shared_soc: str | None
    open_names: tuple[OpenName, ...]
    figures: Mapping[str, Figure]
    dtypes: Mapping[str, DtypeSupport]
    features: Mapping[str, FeatureSupport]
    virtual_slices: tuple[int, ...]


@attrs.frozen
class SocEntry:
    """One SoC name with what its file says beyond the family."""

    soc_name: str
    family: FamilyTable | None
    product: str | None = None
    runtime_value: int | None = None
    aliases: tuple[str, ...] = ()
    slices: tuple[int, ...] = ()
    pre_release: bool = False
    in_data: bool = True
    note: str = ""
    refusal: str | None = None
    figures: Mapping[str, Figure] = attrs.field(factory=dict[str, Figure])
    dtypes: Mapping[str, DtypeSupport] = attrs.field(factory=dict[str, DtypeSupport])


@attrs.frozen
class Label:
    """A text that is met in the field and names no single SoC."""

    text: str
    reason: str
    nearest: tuple[str, ...]


def read_table(name: str) -> Table:
    """Parse ``data/<name>.toml``."""
    path = resources.files("ascend_hwprofile") / "data" / f"{name}.toml"
    return tomllib.loads(path.read_text("utf8"))


@functools.cache
def source_titles() -> Mapping[str, str]:
    """Return source id -> title of the document."""
    return {key: row["title"] for key, row in read_table("sources").items()}


def _number(row: Table) -> int | float:
    value: int | float = row["value"] * _UNITS[row["unit"]] if "unit" in row else row["value"]
    return int(value) if float(value).is_integer() else value


def _figure(row: Table) -> Figure:
    titles = source_titles()
    others = tuple(
        Alternative(_number(other), titles[other["source"]], other.get("note", ""))
        for other in row.get("alternatives", ())
    )
    return Figure(
        _number(row),
        titles[row["source"]],
        Confidence(row["confidence"]),
        row.get("note", ""),
        others,
    )


def _figures(rows: Table) -> dict[str, Figure]:
    return {name: _figure(row) for name, row in rows.items()}


def _dtypes(rows: Table) -> dict[str, DtypeSupport]:
    titles = source_titles()
    return {
        name: DtypeSupport(
            name,
            row["supported"],
            row.get("cube_k"),
            titles[row["source"]],
            Confidence(row["confidence"]),
            row.get("note", ""),
        )
        for name, row in rows.items()
    }


def _features(rows: Table) -> dict[str, FeatureSupport]:
    titles = source_titles()
    return {
        name: FeatureSupport(
            name,
            row.get("supported"),
            row.get("reason", ""),
            titles[row["source"]],
            Confidence(row["confidence"]),
        )
        for name, row in rows.items()
    }


def _open_name(row: Table) -> OpenName:
    return OpenName(
        re.compile(row["pattern"]),
        row["canonical"],
        row.get("product"),
        row.get("pre_release", False),
    )


def _family_table(family: Family, table: Table) -> FamilyTable:
    row: Table = table["family"]
    return FamilyTable(
        family=family,
        title=row["title"],
        products=tuple(row["products"]),
        default_soc=row["default_soc"],
        default_reason=row["default_reason"],
        stems=tuple(row["stems"]),
        toolchain_core=row["toolchain_core"],
        die_pair=row["die_pair"],
        refusal=row.get("refusal"),
        shared_runtime_value=row.get("shared_runtime_value"),
        shared_soc=row.get("shared_soc"),
        open_names=tuple(map(_open_name, row.get("open_names", ()))),
        figures=_figures(row["figures"]),
        dtypes=_dtypes(table["dtypes"]),
        features=_features(table["features"]),
        virtual_slices=tuple(row.get("virtual_slices", {}).get("values", ())),
    )


def _soc_entries(table: Table, family: FamilyTable | None) -> Iterator[SocEntry]:
    only_product = family.products[0] if family and len(family.products) == 1 else None
    shared = family.shared_runtime_value if family else None
    for row in table["soc"]:
        figures, dtypes = _figures(row.get("figures", {})), _dtypes(row.get("dtypes", {}))
        for position, name in enumerate(row["names"]):
            yield SocEntry(
                soc_name=name,
                family=family,
                product=row.get("product", only_product),
                runtime_value=row.get("runtime_value", shared),
                # An alias stands for the first name of its row.
                aliases=tuple(row.get("aliases", ())) if position == 0 else (),
                slices=tuple(row.get("slices", ())),
                pre_release=row.get("pre_release", False),
                note=row.get("note", ""),
                refusal=row.get("refusal", family.refusal if family else None),
                figures=figures,
                dtypes=dtypes,
            )


@functools.cache
def families() -> Mapping[Family, FamilyTable]:
    """Return every family's table."""
    return {table.family: table for table, _ in _parsed_families()}


@functools.cache
def _parsed_families() -> tuple[tuple[FamilyTable, tuple[SocEntry, ...]], ...]:
    parsed: list[tuple[FamilyTable, tuple[SocEntry, ...]]] = []
    for family, file_name in _FAMILY_FILES.items():
        raw = read_table(f"families/{file_name}")
        table = _family_table(family, raw)
        parsed.append((table, tuple(_soc_entries(raw, table))))
    return tuple(parsed)


@functools.cache
def soc_entries() -> tuple[SocEntry, ...]:
    """Return every SoC of the data, family by family; names of no family come last."""
    of_families = [entry for _, entries in _parsed_families() for entry in entries]
    return (*of_families, *_soc_entries(_other(), None))


@functools.cache
def _other() -> Table:
    return read_table("families/other")


@functools.cache
def labels() -> tuple[Label, ...]:
    """Return the texts that are met in the field and name no single SoC."""
    return tuple(
        Label(row["text"], row["reason"], tuple(row["nearest"])) for row in _other()["label"]
    )


@functools.cache
def operator_table() -> Table:
    """Return operator name -> row of ``data/operators.toml``."""
    return read_table("operators")


@functools.cache
def capability_table() -> Table:
    """Return capability value -> row of ``data/capabilities.toml``."""
    return read_table("capabilities")
