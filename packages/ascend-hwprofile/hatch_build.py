"""Build hook: checks the data files, so that no wheel with wrong data can be made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CheckData(BuildHookInterface[Any]):
    """Fails the build when a data file does not fit its schema or contradicts another one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Run the checks of ``ascend_hwprofile.datacheck``."""
        del version, build_data
        sys.path.insert(0, str(Path(self.root) / "src"))
        try:
            import ascend_hwprofile.datacheck as datacheck

            problems = [*datacheck.problems(), *datacheck.staleness()]
        finally:
            sys.path.pop(0)
        if problems:
            raise ValueError("wrong data files:\n" + "\n".join(problems))
