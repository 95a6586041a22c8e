"""Comparison of the version texts of this field, which PEP 440 does not cover (``24.1.rc3.7``)."""

from __future__ import annotations

import re

_PARTS = re.compile(r"\d+(?:\.\d+)*")
_CLAUSE = re.compile(r"\s*(?P<sign>>=|<|==)\s*(?P<version>\d+(?:\.\d+)*)\s*")


def release(text: str) -> tuple[int, ...] | None:
    """Return the leading number parts: ``8.1.RC1`` gives (8, 1), ``2.13.0+cpu`` gives (2, 13, 0).

    None where the text does not start with a number.
    """
    match = _PARTS.match(text.strip())
    return tuple(map(int, match[0].split("."))) if match else None


def in_range(version: tuple[int, ...], allowed: str) -> bool:
    """Return whether a version lies in a range such as ``>=2.13,<2.14``.

    Missing parts count as zero. Release candidates count as their release.

    Raises:
        ValueError: the range cannot be read.
    """
    return all(_holds(version, clause) for clause in allowed.split(","))


def _holds(version: tuple[int, ...], clause: str) -> bool:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise ValueError(f"version range {clause!r}: expected >=, < or == and numbers")
    limit = tuple(map(int, match["version"].split(".")))
    width = max(len(version), len(limit))
    mine, other = (part + (0,) * (width - len(part)) for part in (version, limit))
    return {">=": mine >= other, "<": mine < other, "==": mine == other}[match["sign"]]
