"""Reads the data, once and only when asked for."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
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


@attrs.frozen(eq=False, repr=False)
class SocEntry:
    """One SoC name with what its file says beyond the family."""

    soc_name: str
    family: Family | None
    product: str | None = None
    runtime_value: int | None = None
    aliases: tuple[str, ...] = ()
    slices: tuple[int, ...] = ()
    pre_release: bool = False
    in_data: bool = True
    note: str = ""
    refusal: str | None = None
    row: Table = attrs.field(factory=dict[str, Any])

    def figures(self) -> dict[str, Figure]:
        """Return the figures that the file states for this SoC itself."""
        return _figures(self.row.get("figures", {}))

    def dtypes(self) -> dict[str, DtypeSupport]:
        """Return the dtypes in which this SoC differs from its family."""
        return _dtypes(self.row.get("dtypes", {}))


@attrs.frozen(eq=False, repr=False)
class FamilyTable:
    """What one family file says about the whole family."""

    family: Family
    title: str
    products: tuple[str, ...]
    default_soc: str
    default_reason: str
    stems: tuple[str, ...]
    toolchain_core: str
    source_directories: tuple[str, ...]
    die_pair: bool
    refusal: str | None
    shared_runtime_value: int | None
    shared_soc: str | None
    open_names: tuple[Table, ...]
    virtual_slices: tuple[int, ...]
    entries: tuple[SocEntry, ...]
    table: Table

    def figures(self) -> dict[str, Figure]:
        """Return the figures that hold for every SoC of the family."""
        return _figures(self.table["family"]["figures"])

    def dtypes(self) -> dict[str, DtypeSupport]:
        """Return the dtypes of the cube unit."""
        return _dtypes(self.table["dtypes"])

    def features(self) -> dict[str, FeatureSupport]:
        """Return the features of the architecture."""
        return _features(self.table["features"])


@functools.cache
def _compiled() -> Mapping[str, Table]:
    tables: Mapping[str, Table] = json.loads(_read("compiled.json"))
    return tables


def read_table(name: str) -> Table:
    """Return what ``data/<name>.toml`` says.

    It is read from ``data/compiled.json``, which holds all the TOML files in a form that loads in a
    tenth of the time. ``ascend_hwprofile.datacheck`` writes it and finds out when it is stale.
    """
    return _compiled()[name]


def _read(name: str) -> str:
    # importlib.resources would double the time of `ascend-hwprofile show`.
    with open(os.path.join(os.path.dirname(__file__), "data", name), encoding="utf8") as file:
        return file.read()


def schema_text(name: str) -> str:
    """Return the text of ``data/schema/<name>.json``."""
    return _read(f"schema/{name}.json")


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


@functools.cache
def family_table(family: Family) -> FamilyTable:
    """Return what the file of a family says."""
    table = read_table(f"families/{_FAMILY_FILES[family]}")
    row: Table = table["family"]
    return FamilyTable(
        family=family,
        title=row["title"],
        products=tuple(row["products"]),
        default_soc=row["default_soc"],
        default_reason=row["default_reason"],
        stems=tuple(row["stems"]),
        toolchain_core=row["toolchain_core"],
        source_directories=tuple(row["source_directories"]),
        die_pair=row["die_pair"],
        refusal=row.get("refusal"),
        shared_runtime_value=row.get("shared_runtime_value"),
        shared_soc=row.get("shared_soc"),
        open_names=tuple(row.get("open_names", ())),
        virtual_slices=tuple(row.get("virtual_slices", {}).get("values", ())),
        entries=tuple(_soc_entries(table["soc"], family, row)),
        table=table,
    )


def _soc_entries(rows: list[Table], family: Family | None, shared: Table) -> Iterator[SocEntry]:
    products = shared.get("products", ())
    only_product = products[0] if len(products) == 1 else None
    for row in rows:
        for position, name in enumerate(row["names"]):
            yield SocEntry(
                soc_name=name,
                family=family,
                product=row.get("product", only_product),
                runtime_value=row.get("runtime_value", shared.get("shared_runtime_value")),
                # An alias stands for the first name of its row.
                aliases=tuple(row.get("aliases", ())) if position == 0 else (),
                slices=tuple(row.get("slices", ())),
                pre_release=row.get("pre_release", False),
                note=row.get("note", ""),
                refusal=row.get("refusal", shared.get("refusal")),
                row=row,
            )


def entry_groups() -> Iterator[tuple[SocEntry, ...]]:
    """Yield the SoCs of one family after the other, then the names that belong to none."""
    for family in Family:
        yield family_table(family).entries
    yield _unattached_entries()


@functools.cache
def _unattached_entries() -> tuple[SocEntry, ...]:
    return tuple(_soc_entries(_other()["soc"], None, {}))


@functools.cache
def _other() -> Table:
    return read_table("families/other")


def labels() -> list[Table]:
    """Return the texts that are met in the field and name no single SoC, with the reason."""
    rows: list[Table] = _other()["label"]
    return rows


@functools.cache
def operator_table() -> Table:
    """Return operator name -> row of ``data/operators.toml``."""
    return read_table("operators")


@functools.cache
def capability_table() -> Table:
    """Return capability value -> row of ``data/capabilities.toml``."""
    return read_table("capabilities")
