"""A demo as a command, with the fake server in vLLM's place, and what every demo must do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
from fakes import HERE, all_gone, pids_file, pids_of

BAD_ARGUMENTS = (
    (("--profile", "A9"), 1, "--profile A9"),
    (("--json", "/no/such/folder/x.json"), 1, "--json: found '/no/such/folder/x.json'"),
    (("--port", "70000"), 2, "found '70000', allowed 1 to 65535"),
    (("--ready-seconds", "0"), 2, "found '0', allowed whole seconds from 1"),
)
"""What no demo takes: arguments, exit code, message."""

FAILURES = (
    ("crash", 4, "RuntimeError: no such model [/x]"),
    ("refuses", 5, "too long for the model"),
    ("no-routing", 5, "the server wrote no routing table"),
)
"""What ends every demo: mode of the fake server, exit code, message."""


@attrs.frozen
class DemoCommand:
    """One of the demos.

    Attributes:
        runner: script of this folder that runs it around the fake server.
    """

    runner: str

    def line(self, folder: Path, mode: str, *arguments: str) -> list[str]:
        """The command line."""
        return [sys.executable, str(HERE / self.runner), str(folder), mode, *arguments]

    def run(
        self, folder: Path, mode: str, *arguments: str, seconds: float = 900
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end, with tables so wide that no sentence in them is broken."""
        return subprocess.run(
            self.line(folder, mode, *arguments),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, "COLUMNS": "200"},
        )

    @contextmanager
    def started(
        self, folder: Path, mode: str, *arguments: str, session: bool = False
    ) -> Iterator[subprocess.Popen[str]]:
        """The process while the context lasts; what it says goes to the file `out`.

        Args:
            folder: for everything that it leaves.
            mode: of the fake server.
            arguments: of the demo.
            session: start it as a terminal does, in a process group of its own.
        """
        with (folder / "out").open("w") as out:
            process = subprocess.Popen(
                self.line(folder, mode, *arguments),
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=session,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def assert_starts_nothing(
        self, folder: Path, arguments: tuple[str, ...], code: int, message: str
    ) -> None:
        """Arguments are refused, with a message and without a trace."""
        done = self.run(folder, "ok", *arguments)
        assert_ended(done, code, message)
        assert not pids_file(folder).exists()

    def assert_fails(
        self, folder: Path, mode: str, code: int, message: str, *arguments: str
    ) -> None:
        """A server that does not do its part ends the demo, without a report and leftovers."""
        report = folder / "report.json"
        done = self.run(folder, mode, *arguments, "--json", str(report))
        assert_ended(done, code, message)
        assert not report.exists()
        assert all_gone(pids_of(folder))


def assert_ended(done: subprocess.CompletedProcess[str], code: int, message: str) -> None:
    """A demo ended with a code and a message for people."""
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def work_of(folder: Path) -> Path:
    """Folder of temporary files of the demo, as its runner noted it."""
    return Path((folder / "work").read_text())
