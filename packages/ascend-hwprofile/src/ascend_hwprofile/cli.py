"""The command line: arguments in, a report out."""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ascend_hwprofile.words import Family

if TYPE_CHECKING:
    from ascend_hwprofile.report import Report

_SHELLS = ("bash", "zsh", "tcsh")
_EXIT_CODES = """\
exit codes:
  0  done; doctor: nothing is wrong
  1  unknown or refused SoC, detect: no usable profile, doctor: at least one problem
  2  bad usage
"""
_EXAMPLES = """\
examples:
  ascend-hwprofile detect                   what is this machine?
  ascend-hwprofile diff A3 A5               what can A3 not do that A5 can?
  ascend-hwprofile why 910B3 flash_attn     why is flash_attn refused on 910B3?
  ascend-hwprofile show Ascend950PR_9599 --json
  ascend-hwprofile doctor --expect-npu

"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="ascend-hwprofile",
        description="Facts and capabilities of Huawei Ascend NPUs, with their sources.",
        epilog=_EXAMPLES + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Without `prog` argparse formats a usage text first, which imports shutil and its codecs.
    commands = parser.add_subparsers(
        prog="ascend-hwprofile", dest="command", required=True, metavar="COMMAND"
    )
    command = functools.partial(_command, commands.add_parser)
    one = command("list", "list every SoC of the data", "list --family A2")
    one.add_argument("--family", choices=[family.value for family in Family])
    one = command("show", "everything known about a SoC", "show Ascend910B4-1")
    _soc_argument(one, "soc")
    one = command("diff", "what differs between two SoCs or families", "diff A3 A5")
    _soc_argument(one, "left")
    _soc_argument(one, "right")
    one = command("why", "why an operator or capability is refused", "why 910B3 flash_attn")
    _soc_argument(one, "soc")
    one.add_argument("names", nargs="+", metavar="NAME", help="operator or capability")
    one = command("detect", "which SoC this machine has", "detect --timeout 2")
    one.add_argument(
        "--timeout", type=_positive, default=5.0, help="limit for each probe in seconds"
    )
    _doctor_arguments(command("doctor", "do the installed versions fit together?", "doctor --json"))
    command("schema", "print the JSON schema of what --json prints", "schema")
    one = command("completion", "print a shell completion script", "completion bash")
    one.add_argument("shell", choices=_SHELLS)
    return parser


def _command(
    add_parser: Callable[..., argparse.ArgumentParser],
    name: str,
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    parser = add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example:\n  ascend-hwprofile {example}\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if name not in {"schema", "completion"}:
        parser.add_argument("--json", action="store_true", help="print JSON (see: schema)")
    return parser


def _soc_argument(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(name, metavar="SOC", help="SoC name, or family: A2, A3, A5, 310P, 310B")


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--built-for", metavar="SOC", help="SoC or build string that your kernels were built for"
    )
    parser.add_argument(
        "--expect-npu",
        action="store_true",
        help="call missing NPU software a problem even where no NPU is seen",
    )


def _positive(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Bad usage exits with 2."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command == "completion":
        return _print_completion(parser, options.shell)
    if options.command == "schema":
        return _print_schema()
    from ascend_hwprofile import commands, report
    from ascend_hwprofile.errors import HwProfileError

    try:
        result = _run(options)
    except HwProfileError as error:
        result = commands.refused(options.command, error)
    report.write(result, as_json=options.json)
    return result.exit_code


def _run(options: argparse.Namespace) -> Report:
    from ascend_hwprofile import commands

    if options.command in {"detect", "doctor"}:
        return _run_on_machine(options)
    actions: dict[str, Callable[[], Report]] = {
        "list": lambda: commands.list_socs(options.family),
        "show": lambda: commands.show(options.soc),
        "diff": lambda: commands.diff(options.left, options.right),
        "why": lambda: commands.why(options.soc, options.names),
    }
    return actions[options.command]()


def _run_on_machine(options: argparse.Namespace) -> Report:
    from ascend_hwprofile import machine_commands

    if options.command == "detect":
        return machine_commands.detection(options.timeout)
    return machine_commands.doctor(options.built_for, expect_npu=options.expect_npu)


def _print_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    try:
        import shtab
    except ImportError:
        print(
            "ascend-hwprofile: shell completion needs shtab: "
            "pip install 'ascend-hwprofile[completion]'",
            file=sys.stderr,
        )
        return 1
    print(shtab.complete(parser, shell=shell))
    return 0


def _print_schema() -> int:
    from ascend_hwprofile.catalog import schema_text

    print(schema_text("cli"), end="")
    return 0


def console() -> int:
    """Entry point of the command: like other filters, it ends quietly when its reader does."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return main()
