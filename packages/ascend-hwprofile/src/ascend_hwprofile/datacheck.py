"""Checks the TOML data files and compiles them into ``data/compiled.json``.

``python -m ascend_hwprofile.datacheck`` checks, with ``--write`` it compiles too. It runs when the
package is built and in the tests, and needs fastjsonschema, which the installed package does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ascend_hwprofile import catalog

_FILES = {
    "families/a2": "family",
    "families/a3": "family",
    "families/a5": "family",
    "families/310p": "family",
    "families/310b": "family",
    "families/gen1": "family",
    "families/other": "other",
    "sources": "sources",
    "operators": "operators",
    "capabilities": "capabilities",
    "compatibility": "compatibility",
}

_DATA = Path(__file__).parent / "data"
_COMPILED = _DATA / "compiled.json"

Read = Callable[[str], Mapping[str, Any]]


def read_toml(name: str) -> Mapping[str, Any]:
    """Parse ``data/<name>.toml``."""
    return tomllib.loads((_DATA / f"{name}.toml").read_text("utf8"))


def compiled() -> str:
    """Return what ``data/compiled.json`` has to hold."""
    tables = {name: read_toml(name) for name in _FILES}
    return json.dumps(tables, ensure_ascii=False, indent=0) + "\n"


def problems(read: Read = read_toml) -> list[str]:
    """Return one sentence for each thing that is wrong with the data, none if all is well."""
    tables = {name: read(name) for name in _FILES}
    found = [*_schema_problems(tables)]
    # The other checks take the form of the files for granted.
    return found or [*_source_problems(tables), *_operator_problems(tables), *_rules(tables)]


def staleness(path: Path | None = None) -> list[str]:
    """Return one sentence if the compiled data are not those of the TOML files."""
    path = path or _COMPILED
    if path.exists() and path.read_text("utf8") == compiled():
        return []
    return [f"{path.name} is stale; run: python -m ascend_hwprofile.datacheck --write"]


def _schema_problems(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    import fastjsonschema

    schema = json.loads(catalog.schema_text("data"))
    for name, table in tables.items():
        wanted = {**schema, "$ref": f"#/definitions/{_FILES[name]}"}
        try:
            fastjsonschema.validate(wanted, table)
        except fastjsonschema.JsonSchemaException as error:
            yield f"{name}.toml: {error}"


def _source_ids(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        if "source" in table:
            yield table["source"]
        value = list(table.values())
    if isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _source_ids(item)


def _source_problems(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    known = set(tables["sources"])
    for name, table in tables.items():
        # The rules of the compatibility table quote their source in full.
        if name != "compatibility":
            for source in sorted(set(_source_ids(table)) - known):
                yield f"{name}.toml: unknown source {source!r}; allowed: {', '.join(sorted(known))}"


def _operator_problems(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, row in tables["operators"].items():
        listed = [product for verdict in row["verdicts"] for product in verdict["products"]]
        if len(listed) != len(set(listed)):
            yield f"operators.toml: {name} has two verdicts on one product, found {listed}"
    for name, row in tables["capabilities"].items():
        for operator in row.get("operators", ()):
            if operator not in tables["operators"]:
                yield f"capabilities.toml: {name} names unknown operator {operator!r}"


def _rules(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    components = {row["name"] for row in tables["compatibility"]["component"]}
    for rule in tables["compatibility"]["rule"]:
        for name in (rule["component"], rule["needs"]):
            if name not in components:
                yield f"compatibility.toml: a rule names unknown component {name!r}"
    for name, kind in _FILES.items():
        if kind == "family":
            names = [soc for row in tables[name]["soc"] for soc in row["names"]]
            default = tables[name]["family"]["default_soc"]
            if default not in names:
                yield f"{name}.toml: the default SoC {default} is not one of {names}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the data, and with ``--write`` compile them if nothing is wrong."""
    parser = argparse.ArgumentParser(prog="python -m ascend_hwprofile.datacheck")
    parser.add_argument("--write", action="store_true", help="write data/compiled.json")
    options = parser.parse_args(arguments)
    found = problems()
    if options.write and not found:
        _COMPILED.write_text(compiled(), encoding="utf8")
    for sentence in (*found, *staleness()):
        print(sentence, file=sys.stderr)
    return int(bool(found or staleness()))


if __name__ == "__main__":
    sys.exit(main())
