"""What the host does in a step on an NPU: ``python bench_npu_host_preparation.py [--json FILE]``.

Counted, not timed, by the runtime of an emulated A5 (real torch_npu 2.13, emulated CANN), from the
second step on: copies back to the host, times that the host waits, plan launches, all launches.
Against a naive rebuild: each layer reads the lengths back and builds its own metadata and plan.
Skipped, with the reason, without torch_npu or a C compiler. Nothing here is a claim about speed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from ratios import Ratio, options, report

import ascend_attn_ops as ops
from ascend_attn_ops import emulator

TESTS = Path(__file__).parents[1] / "packages" / "ascend-attn-backends" / "tests"
REQUESTS, LAYERS = 64, 5
COLUMNS = {
    "copies back": "device_to_host_copies",
    "waits": "synchronisations",
    "plans": "plans",
    "launches": "launches",
}


def counted(npu: Any) -> dict[str, dict[str, dict[str, float]]]:
    """Backend -> side -> column -> count of one step; every later step must count the same."""
    sys.path.insert(0, str(TESTS))
    from npu_path import host_preparation as steps

    scale = steps.Scale(lengths=tuple(10 + row % 40 for row in range(REQUESTS)),
                        windows=(None,) * LAYERS)  # fmt: skip
    sides = {"ours": steps.shared_steps, "naive": steps.naive_steps}
    found: dict[str, dict[str, dict[str, float]]] = {}
    with ops.use_profile(npu.profile), npu.without_kernels():
        for subject in steps.SUBJECTS:
            found[subject.name] = {}
            for side, run in sides.items():
                works = {attrs.astuple(w) for w in steps.work_of(npu, run(subject, scale))[1:]}
                if len(works) != 1:
                    raise SystemExit(f"{subject.name}, {side}: steps differ: {sorted(works)}")
                work = steps.Work(*works.pop())
                columns = {text: float(getattr(work, name)) for text, name in COLUMNS.items()}
                found[subject.name][side] = columns
    return found


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """The counts for people."""
    head = "".join(f"{name:>13}" for name in COLUMNS)
    lines = [f"per step, {REQUESTS} requests, {LAYERS} layers, emulated A5", f"{'':<20}{head}"]
    for backend, sides in found.items():
        for side, counts in sides.items():
            cells = "".join(f"{int(counts[name]):>13}" for name in COLUMNS)
            lines.append(f"{backend + ', ' + side:<20}{cells}")
    return "\n".join(lines)


def ratios(found: dict[str, dict[str, dict[str, float]]]) -> Iterator[Ratio]:
    """The goals of this project, on the counts."""
    for backend, sides in found.items():
        label = f"host work of a step, {backend}, {REQUESTS} requests, {LAYERS} layers"
        for column in ("copies back", "waits"):
            detail = {side: counts[column] for side, counts in sides.items()}
            name = f"{label}: {column}, a count (naive: {detail['naive']:.0f})"
            yield Ratio(name, detail["ours"], "<= 0", detail)
    plans = {side: counts["plans"] for side, counts in found["draft_flash"].items()}
    name = f"plans of a draft step, {LAYERS} layers of one geometry: naive / plan cache"
    yield Ratio(name, plans["naive"] / plans["ours"], f">= {LAYERS}", plans)


def main() -> int:
    """Count and report."""
    arguments = options(__doc__).parse_args()
    reason = emulator.unavailable_reason()
    if reason is not None:
        print(f"skipped: {reason}")
        return report([], arguments.json)
    npu = emulator.activate("A5")
    emulator.provide_cann_ops_transformer()
    found = counted(npu)
    print(table(found))
    return report(ratios(found), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
