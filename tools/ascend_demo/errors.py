"""The errors of the tools; each carries the exit code its command ends with."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class ToolError(Exception):
    """Something a person can act on: printed as one message, without a traceback."""

    exit_code: ClassVar[int] = 1


class SetupError(ToolError):
    """The machine, an argument or an environment variable does not allow to start."""

    exit_code = 1


class ModelError(ToolError):
    """The model folder could not be made, or is not what it should be."""

    exit_code = 3


class ServerError(ToolError):
    """The server did not start, did not become ready, or ended by itself."""

    exit_code = 4

    def __init__(self, problem: str, log: Path, tail: str) -> None:
        self.log = log
        super().__init__(f"{problem}\nlast lines of {log}:\n{tail or '(the log is empty)'}")


class RequestError(ToolError):
    """The server was ready but a request to it failed."""

    exit_code = 5
