"""The command line: each command is a module that adds itself to the parser and runs."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final

from ascend_hwprofile import HwProfileError
from ascend_specdecode import report_command, run_command, simulate_command
from ascend_specdecode.errors import SpecDecodeError

DONE, FOUND, USAGE = 0, 1, 2

COMMANDS: Final[Sequence[Callable[[argparse._SubParsersAction[argparse.ArgumentParser]], None]]] = (
    run_command.add,
    simulate_command.add,
    report_command.add,
)
"""What adds each command."""

_EXAMPLES = """\
examples:
  ascend-specdecode run MODEL_DIR --drafter ngram --trace run.json
  ascend-specdecode report run.json --out report
  ascend-specdecode simulate --runs 1000               faults and cancellations in virtual time
  ascend-specdecode simulate --seed 17 --replay        what happened in one run
  ascend-specdecode simulate --speed --profile A5 --acceptance 0.8

exit codes:
  0  done
  1  something did not hold; it is printed
  2  bad usage
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="ascend-specdecode",
        description="Exact draft-verify speculative decoding.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Bad usage exits with 2."""
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except (SpecDecodeError, HwProfileError) as error:
        print(f"ascend-specdecode: {error}", file=sys.stderr)
        return USAGE
    return code


def console() -> int:
    """Entry point of the command: like other filters, it ends quietly when its reader does."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return main()
