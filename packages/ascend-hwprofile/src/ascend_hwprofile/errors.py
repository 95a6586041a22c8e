"""One exception class per situation; each builds its own message."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST_QUOTE = 60


def quoted(text: object) -> str:
    """Return the repr of ``text``, shortened so that a message stays readable."""
    shown = repr(text)
    return shown if len(shown) <= _LONGEST_QUOTE else f"{shown[:_LONGEST_QUOTE]}..."


def _nearest_clause(nearest: Sequence[str]) -> str:
    return f"; nearest known names: {', '.join(nearest)}" if nearest else ""


class HwProfileError(ValueError):
    """Base of every error this package raises on purpose."""


class UnknownSocError(HwProfileError):
    """A text or number that names no known SoC or family."""

    def __init__(self, found: object, reason: str, nearest: Sequence[str] = ()) -> None:
        super().__init__(
            f"unknown SoC {quoted(found)}: {reason}{_nearest_clause(nearest)}; allowed: "
            "A2, A3, A5, 310P, 310B or what `ascend-hwprofile list` shows"
        )
        self.found = found
        self.reason = reason
        self.nearest = tuple(nearest)


class UnsupportedSocError(HwProfileError):
    """A SoC that is recognised and deliberately refused."""

    def __init__(self, soc_name: str, reason: str) -> None:
        super().__init__(f"{soc_name} is not supported: {reason}")
        self.soc_name = soc_name
        self.reason = reason


class UnknownOperatorError(HwProfileError):
    """An operator name that the product support table does not list."""

    def __init__(self, found: object, nearest: Sequence[str] = ()) -> None:
        super().__init__(
            f"unknown operator {quoted(found)}: not in the product support table"
            f"{_nearest_clause(nearest)}"
        )
        self.found = found
        self.nearest = tuple(nearest)


class UnknownFigureError(HwProfileError):
    """A figure that no source read states for this SoC, or a figure name that does not exist."""

    def __init__(self, soc_name: str, figure: str, reason: str) -> None:
        super().__init__(f"{figure} of {soc_name} is not known: {reason}")
        self.soc_name = soc_name
        self.figure = figure
        self.reason = reason
