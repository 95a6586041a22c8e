"""What every benchmark shares: a ratio with its goal, medians of sides taken in turns, the report.

A benchmark writes ``{"ratios": [{"name", "ratio", "goal", "met", "detail"}]}``; the performance
page of the documents is made from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class Ratio:
    """One measured ratio and what is wanted of it.

    Attributes:
        name: What is compared.
        ratio: The ratio.
        goal: What is wanted, for people: ``>= 10`` or ``<= 1.5``.
        detail: What was measured, in milliseconds or counts.
    """

    name: str
    ratio: float
    goal: str
    detail: dict[str, float]

    @property
    def met(self) -> bool:
        """Whether the goal is met in this run."""
        sign, bound = self.goal.split()
        return self.ratio >= float(bound) if sign == ">=" else self.ratio <= float(bound)

    def as_dict(self) -> dict[str, Any]:
        """The ratio as plain data."""
        return attrs.asdict(self) | {"met": self.met}

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        detail = ", ".join(f"{name} {value:.3f}" for name, value in self.detail.items())
        return f"{self.ratio:8.2f}  {self.name}  (goal {self.goal}: {verdict}; {detail})"


def medians(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each side, taken in turns after one warm-up of each."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if turn:
                taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def options(text: str | None) -> argparse.ArgumentParser:
    """The command line that every benchmark has; ``text`` is its module's docstring."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the ratios to this file")
    return parser


def report(ratios: Iterable[Ratio], file: Path | None) -> int:
    """Print each ratio as it comes, write the file; exit code 1 when a goal was missed."""
    found = []
    for ratio in ratios:
        print(ratio, flush=True)
        found.append(ratio)
    if file is not None:
        data = {"ratios": [ratio.as_dict() for ratio in found]}
        file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return int(not all(ratio.met for ratio in found))
