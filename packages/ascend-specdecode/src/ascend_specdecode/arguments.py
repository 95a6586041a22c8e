"""Checks of plain arguments that several records share."""

from __future__ import annotations

import math

from ascend_specdecode.errors import ArgumentError


def check_integer(name: str, value: object, least: int) -> None:
    """Refuse what is not an integer of at least ``least`` (a bool is not an integer).

    Raises:
        ArgumentError: names the argument, what was found and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(name, repr(value), f"an integer >= {least}")


def check_number(name: str, value: object, allowed: str, *, least: float, most: float) -> None:
    """Refuse what is not a finite number in ``least``..``most``; ``allowed`` says so in words.

    Raises:
        ArgumentError: names the argument, what was found and what is allowed.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not least <= value <= most:  # type: ignore[arg-type, operator]
        raise ArgumentError(name, repr(value), allowed)
