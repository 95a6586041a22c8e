"""`ascend-vllm`: explain, check and serve models of vLLM with this plugin."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill

import attrs

from ascend_hwprofile import HwProfileError
from ascend_vllm_plugin.compat import require_supported_vllm, v2_runner_requested
from ascend_vllm_plugin.environment import operator_providers, request_simulation
from ascend_vllm_plugin.errors import ModelRefusedError, PluginError
from ascend_vllm_plugin.garbage import postponed
from ascend_vllm_plugin.model_folder import require_model
from ascend_vllm_plugin.modes import ask_for_mode
from ascend_vllm_plugin.routing import FORMAT, read_routing

DONE, REFUSED, USAGE = 0, 1, 2

_EXAMPLES = {
    "explain": """\
  ascend-vllm explain models/glm-5 --profile A5 --enforce-eager
  ascend-vllm explain models/glm-5 --enforce-eager --json --speculative-config \\
      '{"method": "dflash", "model": "models/glm-5-dflash2", "num_speculative_tokens": 7}'
  ascend-vllm explain models/qwen3 --profile A2 --tensor-parallel-size 2 --additional-config \\
      '{"ascend": {"draft_flash_attn": "wide"}}'
""",
    "doctor": """\
  ascend-vllm doctor
  ascend-vllm doctor --profile A3 --json
""",
    "serve": """\
  ascend-vllm serve models/qwen3 --profile A5 --port 8000 --enforce-eager
""",
    "routing": """\
  ascend-vllm routing routing.json
""",
}
_EXIT_CODES = """\
exit codes:
  0  done; doctor: no problem; explain: every layer has a backend
  1  explain, serve: a layer, a draft or a model is refused; doctor, serve: there are problems
  2  bad usage
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    given, further = parser.parse_known_args(arguments)
    if further and not given.passes_options:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    run: Callable[[argparse.Namespace, list[str]], int] = given.run
    try:
        code = run(given, further)
        sys.stdout.flush()
    except ModelRefusedError as error:
        return _refused(str(error), as_json=False)
    except (PluginError, HwProfileError) as error:
        print(f"ascend-vllm: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ascend-vllm",
        description="Explain, check and serve models of vLLM with the Ascend plugin.",
        epilog=f"examples:\n{''.join(_EXAMPLES.values())}\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    explain = _command(
        commands,
        "explain",
        _explain,
        "which backend each kind of layer of a model gets, and why not another",
        "vLLM builds target and draft as it would to serve them, and reads no weight: config.json "
        "is enough. Options of vLLM's engine may follow MODEL, such as --speculative-config, "
        "--tensor-parallel-size, --dtype, --enforce-eager or --additional-config.",
    )
    explain.add_argument("model", metavar="MODEL", help="folder of the target; comes first")
    _profile_option(explain)
    explain.add_argument("--json", action="store_true", help="print JSON")
    doctor = _command(
        commands,
        "doctor",
        _doctor,
        "what stands between this machine and vLLM with the plugin",
        "Looks at vLLM's version, the profile, other plugins, the environment and the providers "
        "of the operators, and lets vLLM look for its platform.",
    )
    _profile_option(doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    serve = _command(
        commands,
        "serve",
        _serve,
        "vLLM's server, once nothing stands in the way of the plugin",
        "Takes the arguments of `vllm serve`; listens on 127.0.0.1 unless --host is given. With "
        "--profile, and where no NPU is, the model runs on the CPU with the decisions of an NPU.",
    )
    serve.add_argument("model", metavar="MODEL", help="folder or name of the model; comes first")
    _profile_option(serve)
    routing = _command(
        commands, "routing", _routing, "print a routing table that an engine wrote", ""
    )
    routing.add_argument("file", type=Path, help="what ASCEND_VLLM_ROUTING_FILE named")
    for command, passes in ((explain, True), (serve, True), (doctor, False), (routing, False)):
        command.set_defaults(passes_options=passes)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace, list[str]], int],
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=fill(f"{summary[0].upper()}{summary[1:]}. {description}", 80),
        epilog=f"examples:\n{_EXAMPLES[name]}\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    return command


def _profile_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--profile",
        metavar="SOC",
        help="SoC or family to simulate, e.g. A5 (default: the NPU of this machine, else "
        "ASCEND_HWPROFILE, else A5)",
    )


def _explain(given: argparse.Namespace, further: list[str]) -> int:
    require_supported_vllm()
    require_model(given.model)
    operator_providers(), v2_runner_requested()  # wrong ones are named before vLLM is asked
    ask_for_mode(given.profile)
    from ascend_vllm_plugin import explain

    explain.prepare_environment()
    try:
        with postponed():
            arguments = explain.engine_arguments(given.model, further)
    except ValueError as error:  # no such model, or no such value of an option
        print(f"ascend-vllm: {explain.plain_message(error)}", file=sys.stderr)
        return USAGE
    try:
        table = explain.explain(explain.configuration(arguments))
    except Exception as error:  # noqa: BLE001 - vLLM stops at odd models with any error at all
        if os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG":
            traceback.print_exception(error)
        return _refused(explain.plain_message(error), as_json=given.json)
    print(table.to_json() if given.json else table.render())
    return DONE


def _refused(message: str, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"format": FORMAT, "refused": message}, indent=1))
    else:
        print(f"ascend-vllm: {message}", file=sys.stderr)
    return REFUSED


def _doctor(given: argparse.Namespace, further: list[str]) -> int:
    from ascend_vllm_plugin.doctor import PROBLEM, diagnose, render

    if given.profile is not None:
        request_simulation(given.profile)
    findings = diagnose()
    if given.json:
        print(json.dumps([attrs.asdict(finding) for finding in findings], indent=1))
    else:
        print(render(findings))
    return REFUSED if any(finding.status == PROBLEM for finding in findings) else DONE


def _serve(given: argparse.Namespace, further: list[str]) -> int:
    from ascend_vllm_plugin import serve
    from ascend_vllm_plugin.doctor import render

    require_model(given.model)
    ask_for_mode(given.profile)
    problems = serve.obstacles()
    if problems:
        print(render(problems), file=sys.stderr)
        return REFUSED
    serve.serve([given.model, *further])
    return DONE


def _routing(given: argparse.Namespace, further: list[str]) -> int:
    print(read_routing(given.file).render())
    return DONE
