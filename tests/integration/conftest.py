"""Fixtures that several files share."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

# pytest's importlib mode does not make the modules beside a test importable.
sys.path.insert(0, str(Path(__file__).parent))

from engines import REPOSITORY, run_python


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2, made by the tool of the repository unless it is there."""
    tool = REPOSITORY / "tools" / "smollm2.py"
    done = run_python([str(tool), "make", "--json"], dict(os.environ), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(json.loads(done.stdout)["path"])
