"""Print what an installed vLLM build needs, without the packages that must stay CPU builds.

The CPU distribution lists torchvision, torchaudio and torchcodec, whose builds for CUDA break
beside a CPU torch; torch itself is pinned by the caller.

Usage: python tools/vllm_requirements.py DISTRIBUTION
"""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import Requirement

LEFT_OUT = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})


def wanted(distribution: str) -> list[str]:
    """Requirement lines for this machine, extras and ``LEFT_OUT`` excluded."""
    lines = []
    for line in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name.lower() not in LEFT_OUT:
            requirement.marker = None
            lines.append(str(requirement))
    return lines


def main() -> int:
    """Print the lines; exit 2 on bad usage, 1 when the distribution is not installed."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print("\n".join(wanted(sys.argv[1])))
    except importlib.metadata.PackageNotFoundError:
        print(f"{sys.argv[1]} is not installed in this environment", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
