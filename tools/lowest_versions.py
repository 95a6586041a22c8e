"""Print constraints that pin every declared dependency to its lowest allowed version.

Usage: python tools/lowest_versions.py PACKAGE...
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def lowest(package: str) -> dict[str, Version]:
    """Lowest version of each dependency that ``packages/PACKAGE/pyproject.toml`` declares."""
    data = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text("utf-8"))
    found: dict[str, Version] = {}
    for line in data["project"]["dependencies"]:
        requirement = Requirement(line)
        floors = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")]
        if not floors:
            raise SystemExit(f"{package}: {line!r} declares no lowest version")
        if not requirement.name.startswith("ascend-"):
            found[requirement.name] = max(floors)
    return found


def main() -> int:
    """Print ``name==version`` lines, the highest floor where packages differ."""
    floors: dict[str, Version] = {}
    for package in sys.argv[1:]:
        for name, version in lowest(package).items():
            floors[name] = max(version, floors.get(name, version))
    torch = floors.pop("torch", None)
    if torch is not None:  # 2.13 means the CPU build 2.13.0
        print(f"torch=={torch}.0" if len(torch.release) == 2 else f"torch=={torch}")
    print("\n".join(f"{name}=={version}" for name, version in sorted(floors.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
