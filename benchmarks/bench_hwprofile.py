"""Start-up cost of ascend-hwprofile, as ratios to ``python -c pass`` measured in the same run.

    python benchmarks/bench_hwprofile.py [--pairs 20] [--json PATH]

Each ratio is the median over pairs of (command, bare interpreter) that run right after each other,
so that a machine that gets slower or faster in between does not count. Exit code 1 if a ratio is
over its limit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

BARE = ["-c", "pass"]
# name: (arguments of the interpreter, largest allowed ratio)
CASES = {
    "import": (["-c", "import ascend_hwprofile"], 4.0),
    "show": (["-m", "ascend_hwprofile", "show", "Ascend950PR_9599"], 10.0),
    "show_json": (["-m", "ascend_hwprofile", "show", "Ascend950PR_9599", "--json"], 10.0),
}


def seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure(arguments: list[str], limit: float, pairs: int) -> dict[str, float | int | bool]:
    seconds(arguments)  # compiles and caches what the first run needs
    runs = [(seconds(BARE), seconds(arguments)) for _ in range(pairs)]
    ratio = statistics.median(full / bare for bare, full in runs)
    return {
        "ratio": round(ratio, 3),
        "limit": limit,
        "within_limit": ratio <= limit,
        "pairs": pairs,
        "bare_ms": round(statistics.median(bare for bare, _ in runs) * 1e3, 2),
        "command_ms": round(statistics.median(full for _, full in runs) * 1e3, 2),
    }


def hot_path() -> dict[str, float]:
    """Return the cost of a capability question relative to a bare set look-up."""
    import timeit

    from ascend_hwprofile import Capability, profile_for

    profile, capability = profile_for("A5"), Capability.MLA
    names = {"profile": profile, "capability": capability, "profile_for": profile_for}
    lookup = min(timeit.repeat("capability in profile.capabilities", globals=names, number=200_000))
    ask = min(timeit.repeat("profile.supports(capability)", globals=names, number=200_000))
    cached = min(timeit.repeat("profile_for('A5')", globals=names, number=200_000))
    return {
        "supports_over_set_lookup": round(ask / lookup, 3),
        "cached_profile_for_over_set_lookup": round(cached / lookup, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    options = parser.parse_args()
    results = {name: measure(*case, options.pairs) for name, case in CASES.items()}
    for name, result in results.items():
        verdict = "ok" if result["within_limit"] else "OVER THE LIMIT"
        print(
            f"{name:10} {result['ratio']:6.2f} x python -c pass (limit {result['limit']:g}, "
            f"median of {options.pairs} pairs): {verdict}"
        )
    hot = hot_path()
    for name, ratio in hot.items():
        print(f"{name}: {ratio:.2f}")
    if options.json is not None:
        document = {
            "benchmark": "hwprofile",
            "python": platform.python_version(),
            "startup": results,
            "hot_path": hot,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf8")
    return 0 if all(result["within_limit"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
