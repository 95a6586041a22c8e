"""Command line: what the operators are, whether arguments are legal, and why not."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ascend_hwprofile import HardwareProfile, HwProfileError, profile_for

from . import matrix as tables
from .arguments import from_data, parameters
from .context import current_profile
from .contract import Rule
from .operator import Operator
from .refusals import ArgumentFormatError, Refusal, UnknownOperatorError
from .registry import all_operators, operator_named
from .selection import check, common_rules, missing_package

ACCEPTED, REFUSED, USAGE = 0, 1, 2

_EXAMPLES = """\
examples:
  ascend-attn-ops list
  ascend-attn-ops show scatter_pa_kv_cache
  ascend-attn-ops show scatter_pa_kv_cache.cache_mode
  ascend-attn-ops check scatter_pa_kv_cache --profile A3 case.json
  ascend-attn-ops matrix --format json
  ascend-attn-ops info

exit codes: 0 accepted or done, 1 refused, 2 bad usage
"""

_PROFILE_HELP = (
    "family or SoC name, e.g. A3, Ascend910B3; default: ASCEND_HWPROFILE, else no product: "
    "the contract that all share"
)

_CASE_FORMAT = """\
FILE holds a JSON object of arguments by name, or a list of such objects ("-" reads standard
input). A tensor is {"shape": [4, 8], "dtype": "bfloat16"} with optional "strides" and "values";
a scalar or a list of integers is itself; an absent name is not passed.

  {"key": {"shape": [16, 4, 32], "dtype": "float16"}, ..., "cache_mode": "Norm"}

A list of cases gives a list of verdicts in the same order and exit code 0 once all are judged.
"""


class _UsageError(Exception):
    """Bad usage: the message goes to standard error, the exit code is 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except (_UsageError, UnknownOperatorError, ArgumentFormatError, HwProfileError) as error:
        print(f"ascend-attn-ops: {error}", file=sys.stderr)
        return USAGE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ascend-attn-ops",
        description="Executable contracts of CANN attention operators.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    entry = _command(commands, "list", _list, "the operators and what they do")
    entry.add_argument("--json", action="store_true", help="as data")
    entry = _command(commands, "show", _show, "an operator's parameters and rules, or one rule")
    entry.add_argument("name", metavar="OP_OR_RULE")
    entry.add_argument("--json", action="store_true", help="as data")
    entry = _command(commands, "check", _check, "judge arguments", _CASE_FORMAT)
    entry.add_argument("operator", metavar="OP")
    entry.add_argument("file", metavar="FILE")
    entry.add_argument("--profile", help=_PROFILE_HELP)
    entry.add_argument("--provider", help="judge for this provider; default: as CANN does")
    entry.add_argument("--json", action="store_true", help="verdict as data")
    entry = _command(commands, "matrix", _matrix, "operator x product x provider")
    entry.add_argument("--format", choices=("markdown", "json"), default="markdown")
    entry.add_argument("--json", action="store_true", help="same as --format json")
    entry = _command(commands, "info", _info, "which providers work here, and why not the others")
    entry.add_argument("--json", action="store_true", help="as data")
    return parser


def _command(
    commands: Any, name: str, run: Any, text: str, epilog: str | None = None
) -> argparse.ArgumentParser:
    entry: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    entry.set_defaults(run=run)
    return entry


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=1))


def _list(arguments: argparse.Namespace) -> int:
    rows = [(op.name, str(op.contract.data["summary"])) for op in all_operators()]
    if arguments.json:
        _print_json([{"operator": name, "summary": text} for name, text in rows])
        return ACCEPTED
    table = Table("operator", "what it does")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return ACCEPTED


def _show(arguments: argparse.Namespace) -> int:
    rule = _rule_data(arguments.name)
    if rule is None:
        return _show_operator(operator_named(arguments.name), as_json=arguments.json)
    if arguments.json:
        _print_json(rule)
        return ACCEPTED
    for key, value in rule.items():
        print(f"{key + ':':<11}{'-' if value in (None, '', []) else value}")
    return ACCEPTED


def _rule_data(name: str) -> Mapping[str, Any] | None:
    if name in common_rules():
        entry = common_rules()[name]
        return {"rule": name, **entry, "scope": "every operator"}
    operator = name.split(".", maxsplit=1)[0]
    for op in all_operators():
        if op.name == operator and name != operator:
            return _described(op, name)
    return None


def _described(op: Operator[Any], name: str) -> Mapping[str, Any]:
    for rule in op.contract.rules:
        if rule.id == name:
            return _as_data(rule)
    known = ", ".join(rule.id for rule in op.contract.rules)
    raise _UsageError(f"unknown rule {name!r}; rules of {op.name}: {known}")


def _as_data(rule: Rule) -> Mapping[str, Any]:
    return {
        "rule": rule.id,
        "parameter": rule.parameter,
        "allowed": rule.allowed,
        "why": rule.why,
        "code": rule.cann_code,
        "scope": rule.scope.value,
        "families": sorted(rule.families),
        "source": rule.source,
    }


def _show_operator(op: Operator[Any], *, as_json: bool) -> int:
    data = {
        "operator": op.name,
        "summary": op.contract.data["summary"],
        "schema": op.schema,
        "sources": op.contract.data["sources"],
        "parameters": [_parameter_data(parameter) for parameter in parameters(op.record)],
        "providers": list(op.providers),
        "limits": op.contract.data.get("limits", {}),
        "rules": [_as_data(rule) for rule in op.contract.rules],
    }
    if as_json:
        _print_json(data)
        return ACCEPTED
    print(f"{op.name}: {data['summary']}\n\n{op.record.__doc__}\n\nschema: {op.schema}\n")
    table = Table("rule", "parameter", "allowed", "CANN", "asked")
    for rule in op.contract.rules:
        where = ", ".join(sorted(rule.families)) or rule.scope.value
        table.add_row(rule.id, rule.parameter, rule.allowed, str(rule.cann_code or "-"), where)
    Console(markup=False).print(table)
    return ACCEPTED


def _parameter_data(parameter: Any) -> Mapping[str, Any]:
    return {
        "name": parameter.name,
        "kind": parameter.kind,
        "optional": parameter.optional,
        "default": None if parameter.required else parameter.default,
        "required": parameter.required,
    }


def _check(arguments: argparse.Namespace) -> int:
    op = operator_named(arguments.operator)
    profile = profile_for(arguments.profile) if arguments.profile else current_profile()
    data = _read(arguments.file)
    cases = data if isinstance(data, list) else [data]
    verdicts = [
        _judged(op, case, index, profile, arguments.provider) for index, case in enumerate(cases)
    ]
    if isinstance(data, list):
        _print_verdicts(op, verdicts, as_json=arguments.json)
        return ACCEPTED
    if arguments.json:
        _print_json(_verdict_data(verdicts[0]))
    else:
        _print_verdict(op, verdicts[0])
    return REFUSED if verdicts[0] else ACCEPTED


def _read(name: str) -> Any:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
        return json.loads(text)
    except OSError as error:
        raise _UsageError(f"cannot read {name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # numbers of 4,301 digits, nested too deeply
        raise _UsageError(f"{name} is not JSON: {error}") from error


def _judged(
    op: Operator[Any],
    case: Any,
    index: int,
    profile: HardwareProfile | None,
    provider: str | None,
) -> list[Refusal]:
    if not isinstance(case, Mapping):
        raise _UsageError(f"case {index} is not an object of arguments by name")
    if provider is not None and provider not in op.providers:
        raise _UsageError(f"unknown provider {provider!r}; {op.name}: {', '.join(op.providers)}")
    try:
        record = from_data(op.record, case)
    except ArgumentFormatError as error:
        raise _UsageError(f"case {index}: {error}") from error
    return check(op, record, profile, provider)


def _verdict_data(refusals: list[Refusal]) -> Mapping[str, Any]:
    return {
        "verdict": "refuse" if refusals else "accept",
        "refusals": [refusal.as_dict() for refusal in refusals],
    }


def _print_verdicts(op: Operator[Any], verdicts: list[list[Refusal]], *, as_json: bool) -> None:
    if as_json:
        _print_json([_verdict_data(refusals) for refusals in verdicts])
        return
    for index, refusals in enumerate(verdicts):
        print(f"case {index}: ", end="")
        _print_verdict(op, refusals)


def _print_verdict(op: Operator[Any], refusals: list[Refusal]) -> None:
    print(f"{op.name}: {'refuse' if refusals else 'accept'}")
    for refusal in refusals:
        print(f"  - {refusal}")


def _matrix(arguments: argparse.Namespace) -> int:
    if arguments.json or arguments.format == "json":
        _print_json(tables.matrix())
    else:
        print(tables.markdown(), end="")
    return ACCEPTED


def _info(arguments: argparse.Namespace) -> int:
    rows = [
        {
            "provider": name,
            "operators": sum(name in op.providers for op in all_operators()),
            "missing": missing_package(name),
        }
        for name in tables.PROVIDERS
    ]
    if arguments.json:
        _print_json(rows)
        return ACCEPTED
    table = Table("provider", "operators", "usable here")
    for row in rows:
        table.add_row(str(row["provider"]), str(row["operators"]), str(row["missing"] or "yes"))
    Console(markup=False).print(table)
    return ACCEPTED


def console() -> int:
    """Entry point of the command: like other filters, it ends quietly when its reader does."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return main()
