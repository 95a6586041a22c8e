"""What the command lines of the demos share: argument types, work folder, signals, exit codes."""

from __future__ import annotations

import argparse
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ascend_demo.errors import SetupError, ToolError
from ascend_demo.progress import print_error


class EndedBySignal(BaseException):  # like KeyboardInterrupt, it is no error
    """SIGTERM or SIGHUP arrived; raised so that every `with` block is left in order."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"ended by {signal.Signals(number).name}")


def port(text: str) -> int:
    """Argument type: a TCP port."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed 1 to 65535")
    return int(text)


def seconds(text: str) -> float:
    """Argument type: whole seconds, at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed whole seconds from 1")
    return float(text)


def check_report_file(file: Path | None) -> None:
    """Refuse a report file that could not be written once everything has run.

    Raises:
        SetupError: it is a folder, or its folder does not exist.
    """
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise SetupError(f"--json: found {str(file)!r}, allowed a file in a folder that exists")


@contextmanager
def work_folder() -> Iterator[Path]:
    """Give a folder for log and routing table; it stays when an error message points into it."""
    folder = Path(tempfile.mkdtemp(prefix="ascend-demo-"))
    keep = False
    try:
        yield folder
    except ToolError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder)


def raise_on_signals() -> None:
    """Turn SIGTERM and SIGHUP, which would end us on the spot, into an exception."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise EndedBySignal(number)

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGHUP, handler)


def exit_code_of(run: Callable[[], None]) -> int:
    """Run a command; print what ended it early as one message, and return its exit code."""
    raise_on_signals()
    try:
        run()
    except ToolError as error:
        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted; the server was ended")
        return 130
    except EndedBySignal as signal_error:
        print_error(f"{signal_error}; the server was ended")
        return signal_error.exit_code
    return 0
