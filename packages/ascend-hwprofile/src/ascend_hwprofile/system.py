"""What detection and the doctor may look at, as one record, so that tests can hand in another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util

import attrs


@attrs.frozen
class CommandResult:
    """The end of a command: exit code and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_command(command: Sequence[str], timeout_seconds: float) -> CommandResult:
    """Run a command without a shell and kill it when the time is up.

    Raises:
        OSError: the program cannot be started.
        subprocess.TimeoutExpired: it did not end in time.
    """
    done = subprocess.run(
        list(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_seconds,
        check=False,
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


def distribution_version(name: str) -> str | None:
    """Return the version of an installed distribution, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_folder(name: str) -> str | None:
    """Return the folder of an installed top-level package without importing it."""
    spec = util.find_spec(name)
    locations = spec.submodule_search_locations if spec else None
    return next(iter(locations), None) if locations else None


@attrs.frozen
class System:
    """The machine as the probes see it.

    ``root`` is prefixed to every absolute path, ``modules`` are the imported modules, ``run`` runs
    a command with a time limit, ``version_of`` returns the version of a Python distribution and
    ``package_folder`` the folder of a package.
    """

    environ: Mapping[str, str] = attrs.field(factory=lambda: os.environ)
    root: str = "/"
    modules: Mapping[str, object] = attrs.field(factory=lambda: sys.modules, repr=False)
    run: Callable[[Sequence[str], float], CommandResult] = run_command
    version_of: Callable[[str], str | None] = distribution_version
    package_folder: Callable[[str], str | None] = package_folder
    python_version: str = attrs.field(factory=lambda: ".".join(map(str, sys.version_info[:3])))

    def path(self, absolute: str) -> str:
        """Return ``absolute`` under this system's root."""
        return os.path.join(self.root, absolute.lstrip("/"))

    def variable(self, name: str) -> str | None:
        """Return an environment variable, None if it is unset or blank."""
        return self.environ.get(name, "").strip() or None
