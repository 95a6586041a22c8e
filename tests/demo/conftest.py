from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _own_folders(request: pytest.FixtureRequest) -> None:
    """Keep light tests out of the user's cache, and what their commands leave in one place."""
    if request.node.get_closest_marker("engine") is None:
        monkeypatch = request.getfixturevalue("monkeypatch")
        tmp_path = request.getfixturevalue("tmp_path")
        monkeypatch.setenv("ASCEND_DEMO_CACHE", str(tmp_path / "cache"))
        (tmp_path / "temporary").mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
