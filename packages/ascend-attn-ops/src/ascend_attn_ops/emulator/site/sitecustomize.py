"""Start of every Python process below ``emulator run``: load the emulated CANN libraries.

Python imports the first ``sitecustomize`` on its path; the one it would have found without us, if
any, runs afterwards.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent


def _run(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # noqa: S101 - a .py file always has one
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _next_origin() -> str | None:
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    return None if spec is None else spec.origin


_folder = os.environ.get("ASCEND_EMULATOR_LIBRARIES")
if _folder:
    try:
        _run("_ascend_emulator_preload", _HERE.parent / "preload.py").prepare_child(Path(_folder))
    except Exception as error:  # noqa: BLE001 - Python would go on, and without an NPU
        print(f"ascend emulator: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
_origin = _next_origin()
if _origin is not None:
    _run("sitecustomize_of_the_environment", Path(_origin))
