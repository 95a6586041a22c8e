"""Folders that are either complete or absent, kept outside the checkout.

A folder is built beside its final place and renamed into it, so that an interrupted build leaves
nothing that looks complete. A marker file holds the size and SHA-256 of every file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import filelock
import platformdirs

from ascend_demo.errors import ModelError, SetupError

CACHE_VARIABLE: Final = "ASCEND_DEMO_CACHE"
MARKER: Final = "complete.json"
LOCK_SECONDS: Final = 600.0


def cache_folder() -> Path:
    """Return the cache: `ASCEND_DEMO_CACHE`, else the user's XDG cache of this project.

    Raises:
        SetupError: the variable does not hold an absolute path to a folder.
    """
    named = os.environ.get(CACHE_VARIABLE, "")
    if not named:
        return Path(platformdirs.user_cache_path("ascend-attention-stack"))
    path = Path(named).expanduser()
    if not path.is_absolute() or (path.exists() and not path.is_dir()):
        raise SetupError(
            f"{CACHE_VARIABLE}: found {named!r}, allowed the absolute path of a folder"
        )
    return path


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def problems(folder: Path) -> list[str]:
    """Say why `folder` is not complete; an empty list means every file is as it was made."""
    if not folder.is_dir():
        return [f"{folder} does not exist"]
    try:
        files: Mapping[str, Mapping[str, Any]] = json.loads((folder / MARKER).read_text())["files"]
    except FileNotFoundError:
        return [f"{folder / MARKER} is missing"]
    except (ValueError, KeyError, TypeError) as error:
        return [f"{folder / MARKER} is not a marker of this tool ({error})"]
    found = []
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.stat().st_size != expected["bytes"]:
            found.append(f"{path}: found {path.stat().st_size} bytes, made {expected['bytes']}")
        elif file_digest(path) != expected["sha256"]:
            found.append(f"{path}: SHA-256 differs from {expected['sha256']}")
    return found


def write_marker(folder: Path, about: Mapping[str, Any]) -> None:
    """Record size and SHA-256 of every file in `folder`, with `about` beside them."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in sorted(folder.iterdir())
    }
    (folder / MARKER).write_text(json.dumps({**about, "files": files}, indent=2) + "\n")


@contextmanager
def exclusive(folder: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Let one process at a time work on `folder`; the lock ends with its process.

    Raises:
        SetupError: the folder beside which the lock is kept cannot be written.
        ModelError: another process kept the lock for `seconds`.
    """
    lock = folder.parent / f".{folder.name}.lock"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(lock, timeout=seconds):
            yield
    except filelock.Timeout as error:
        problem = f"another process has been working on {folder} for {seconds:.0f} s ({lock})"
        raise ModelError(problem) from error
    except PermissionError as error:
        raise SetupError(f"cannot write to {folder.parent}: {error}") from error


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Give an empty folder that becomes `folder` if the block succeeds, and vanishes if not.

    Call it inside :func:`exclusive`: leftovers of killed processes are removed first.
    """
    prefix = f".{folder.name}.partial-"
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        built = partial / "new"
        built.mkdir()
        yield built
        if folder.exists():
            folder.rename(partial / "old")
        built.rename(folder)
    finally:
        shutil.rmtree(partial)
