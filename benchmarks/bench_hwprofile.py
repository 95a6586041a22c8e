"""Start-up cost of ascend-hwprofile, as ratios to ``python -c pass`` measured in the same run.

    python benchmarks/bench_hwprofile.py [--pairs 20] [--json PATH]

Each ratio is the median over pairs of (command, bare interpreter) that run right after each other,
so that a machine that gets slower or faster in between does not count. Exit code 1 if a ratio is
over its limit.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator

from ratios import Ratio, options, report

BARE = ["-c", "pass"]
# name: (arguments of the interpreter, goal)
CASES = {
    "import": (["-c", "import ascend_hwprofile"], "<= 4"),
    "show": (["-m", "ascend_hwprofile", "show", "Ascend950PR_9599"], "<= 10"),
    "show_json": (["-m", "ascend_hwprofile", "show", "Ascend950PR_9599", "--json"], "<= 10"),
}


def seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure(name: str, arguments: list[str], goal: str, pairs: int) -> Ratio:
    seconds(arguments)  # compiles and caches what the first run needs
    runs = [(seconds(BARE), seconds(arguments)) for _ in range(pairs)]
    bare, full = zip(*runs, strict=True)
    detail = {"bare ms": statistics.median(bare) * 1e3, "ms": statistics.median(full) * 1e3}
    ratio = statistics.median(f / b for b, f in runs)
    return Ratio(f"{name} / python -c pass", ratio, goal, detail)


def hot_path() -> Iterator[Ratio]:
    """The cost of a capability question relative to a bare set look-up."""
    from ascend_hwprofile import Capability, profile_for

    profile, capability = profile_for("A5"), Capability.MLA
    names = {"profile": profile, "capability": capability, "profile_for": profile_for}

    def nanoseconds(statement: str) -> float:
        return min(timeit.repeat(statement, globals=names, number=200_000)) / 200_000 * 1e9

    lookup = nanoseconds("capability in profile.capabilities")
    for label, statement in (
        ("supports(capability)", "profile.supports(capability)"),
        ("profile_for(name), cached", "profile_for('A5')"),
    ):
        spent = nanoseconds(statement)
        detail = {"look-up ns": lookup, "ns": spent}
        yield Ratio(f"{label} / set look-up", spent / lookup, "<= 10", detail)


def ratios(pairs: int) -> Iterator[Ratio]:
    """All ratios."""
    for name, (arguments, goal) in CASES.items():
        yield measure(name, arguments, goal, pairs)
    yield from hot_path()


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parsed = parser.parse_args()
    return report(ratios(parsed.pairs), parsed.json)


if __name__ == "__main__":
    sys.exit(main())
