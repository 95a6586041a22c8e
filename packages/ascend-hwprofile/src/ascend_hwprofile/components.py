"""Finds the parts of the software stack: versions, folders, unsourced environment scripts."""

from __future__ import annotations

import enum
import glob
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ascend_hwprofile.system import System

_VERSION_LINE = re.compile(
    r"^\s*\w*version\s*=\s*\[?(?:[^:\]\n]*:)?(?P<version>\d[^\]\s]*)", re.IGNORECASE | re.MULTILINE
)


class State(enum.StrEnum):
    """Whether a component is there and usable."""

    INSTALLED = "installed"
    NOT_INSTALLED = "not installed"
    NOT_SOURCED = "environment script not sourced"
    BROKEN = "broken"


@attrs.frozen
class Component:
    """One part of the stack as found. ``detail`` says where, or what is wrong with it."""

    name: str
    title: str
    state: State
    version: str | None
    detail: str
    advice: str
    needs_npu: bool


def find_components(table: Mapping[str, Any], system: System) -> tuple[Component, ...]:
    """Look for every component of the compatibility table."""
    return tuple(_find(row, system) for row in table["component"])


def _find(row: Mapping[str, Any], system: System) -> Component:
    if row["name"] == "python":
        return _component(row, State.INSTALLED, system.python_version, "this interpreter", "")
    if "distributions" in row:
        return _find_distribution(row, system)
    return _find_folder(row, system)


def _component(
    row: Mapping[str, Any], state: State, version: str | None, detail: str, advice: str
) -> Component:
    needs_npu = row.get("needs_npu", False)
    return Component(row["name"], row["title"], state, version, detail, advice, needs_npu)


def _find_distribution(row: Mapping[str, Any], system: System) -> Component:
    for name in row["distributions"]:
        version = system.version_of(name)
        if version is not None:
            return _component(row, State.INSTALLED, version, f"distribution {name}", "")
    wanted = " or ".join(row["distributions"])
    detail = f"no distribution {wanted}"
    return _component(row, State.NOT_INSTALLED, None, detail, row["install"])


def _find_folder(row: Mapping[str, Any], system: System) -> Component:
    for variable in row.get("variables", ()):
        folder = system.variable(variable)
        if folder is not None and os.path.isdir(folder):
            return _component(row, State.INSTALLED, _version(row, folder), folder, "")
        if folder is not None:
            detail = f"{variable} names {folder}, which is not a folder"
            return _component(row, State.BROKEN, None, detail, f"correct {variable}")
    for folder in map(system.path, row["folders"]):
        if os.path.isdir(folder):
            return _found_in_default_place(row, folder)
    places = ", ".join(row["folders"])
    return _component(row, State.NOT_INSTALLED, None, f"not in {places}", row["install"])


def _found_in_default_place(row: Mapping[str, Any], folder: str) -> Component:
    version = _version(row, folder)
    if not row.get("variables"):
        return _component(row, State.INSTALLED, version, folder, "")
    names = " or ".join(row["variables"])
    script = next(_existing(folder, row["scripts"]), os.path.join(folder, row["scripts"][0]))
    detail = f"found in {folder}, but {names} is not set"
    return _component(row, State.NOT_SOURCED, version, detail, f"source {script}")


def _existing(folder: str, names: list[str]) -> Iterator[str]:
    for name in names:
        path = os.path.normpath(os.path.join(folder, name))
        if os.path.exists(path):
            yield path


def _version(row: Mapping[str, Any], folder: str) -> str | None:
    for pattern in row["version_files"]:
        for path in sorted(glob.glob(os.path.join(folder, pattern))):
            with open(path, encoding="utf8", errors="replace") as file:
                match = _VERSION_LINE.search(file.read())
            if match:
                return match["version"]
    return None
