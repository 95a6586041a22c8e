"""A GLM-5-type model with a DFlash2 draft in real vLLM, on a simulated NPU: routed and explained.

Serves the tiny trained glm_moe_dsa of assets/ by vLLM's OpenAI server on 127.0.0.1 with the plugin
in simulate mode, one way after the other: without a draft, with its MTP layer, with a DFlash2 draft
on the draft backend, and with the same draft kept off that backend. Prints the text, the routing
with the verdict of every term of the draft gate, acceptance per position, plans built beside steps,
and time per output token. Figures of a tiny model say nothing about GLM-5.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ascend_demo.chat import Answer, Question, complete, settled
from ascend_demo.command import check_report_file, exit_code_of, port, seconds, work_folder
from ascend_demo.errors import RequestError
from ascend_demo.glm import DRAFT, QUESTIONS, VARIANTS, WARM_UP, Variant, check_models
from ascend_demo.glm import server_settings as glm_settings
from ascend_demo.glm_report import Outcome, report, show, show_routing
from ascend_demo.launch import check_environment, read_routing_table, routing_file, versions
from ascend_demo.metrics import parse_steps
from ascend_demo.progress import starting_progress
from ascend_demo.report import write_json
from ascend_demo.server import RunningServer, call_worker, choose_port, log_tail, serving
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from ascend_vllm_plugin import RoutingTable

EPILOG = """\
examples:
  nox -s demo-glm                                everything, on a free port
  python tools/demo_glm.py --profile A2          a family whose gate refuses the draft backend
  python tools/demo_glm.py --json report.json    also write what was found as JSON
  python tools/demo_glm.py --variant plain --variant dflash      two ways only
  python tools/demo_glm.py --draft FOLDER        another DFlash draft of the tiny GLM, such as
                                                 tools/tiny_glm/train_draft.py makes

exit codes:
  0  done
  1  it cannot start: port in use, unknown profile, package or model missing, folder not writable
  2  wrong arguments
  4  a server did not start, was not ready in time, or ended by itself
  5  a request failed, or a server wrote no routing table
  130, 143, 129  ended by Ctrl-C, SIGTERM, SIGHUP; the server is ended first
"""
SILENT_SECONDS: Final = 120.0


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--port", type=port, help="where to listen (default: a free port)")
    parser.add_argument("--profile", default="A5", help="SoC or family to simulate (default: A5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here too")
    parser.add_argument(
        "--variant", action="append", choices=names, help="serve this way only; may be repeated"
    )
    parser.add_argument(
        "--draft", type=Path, default=DRAFT, metavar="FOLDER", help="the DFlash draft to serve"
    )
    parser.add_argument(
        "--ready-seconds", type=seconds, default=300.0, help="wait for a server (default: 300)"
    )
    return parser


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Run the whole demo.

    Raises:
        ToolError: with the exit code of what went wrong.
    """
    check_environment(arguments.profile, session="demo-glm")
    check_report_file(arguments.json)
    check_models(arguments.draft)
    chosen = choose_port(arguments.port)
    wanted = arguments.variant or [variant.name for variant in VARIANTS]
    with work_folder() as work:
        outcomes = tuple(
            serve_variant(variant, arguments, chosen, work, console)
            for variant in VARIANTS
            if variant.name in wanted
        )
        show(outcomes, console)
        if arguments.json:
            write_json(arguments.json, report(outcomes, versions()))


def serve_variant(
    variant: Variant, arguments: argparse.Namespace, chosen: int, work: Path, console: Console
) -> Outcome:
    """Serve one variant, ask every prompt, end the server, and show its routing."""
    console.rule(f"[bold]{escape(variant.title)}", align="left")
    folder = work / variant.name
    folder.mkdir()
    settings = glm_settings(
        variant,
        arguments.draft.absolute(),
        chosen,
        arguments.profile,
        folder,
        arguments.ready_seconds,
    )
    with starting_progress() as progress, serving(settings, progress.update) as server:
        progress.stop()
        answers, steps = ask_all(server, variant, console)
        routing = routing_with_plans(server, routing_file(folder))
    show_routing(routing, console)
    return Outcome(variant, server.seconds_to_ready, answers, steps, routing)


def ask_all(
    server: RunningServer, variant: Variant, console: Console
) -> tuple[tuple[Answer, ...], int]:
    """Warm up, send every prompt, and read how many steps all that took."""
    speculates = variant.method is not None
    try:
        complete(server.url, WARM_UP, SILENT_SECONDS, lambda _: None, speculates=speculates)
        answers = tuple(ask_one(server, question, speculates, console) for question in QUESTIONS)
        return answers, settled(server.url, parse_steps)
    except (RequestError, OSError, ValueError) as error:
        log = server.settings.log
        raise RequestError(f"{error}\nlast lines of {log}:\n{log_tail(log, 30)}") from error


def routing_with_plans(server: RunningServer, file: Path) -> RoutingTable:
    """Read the routing as the worker has it now: its file is older than the plans.

    Raises:
        RequestError: the plugin wrote no table, or its worker does not answer.
    """
    read_routing_table(file)  # refuses a server that ran without the plugin
    try:
        file.write_text(call_worker(server.url, "routing"), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RequestError(f"the worker did not tell its plans: {error}") from error
    return read_routing_table(file)


def ask_one(
    server: RunningServer, question: Question, speculates: bool, console: Console
) -> Answer:
    """Show a prompt and, as it arrives, its continuation."""
    console.print(question.prompt, style="dim", end="", markup=False, highlight=False)
    answer = complete(
        server.url,
        question,
        SILENT_SECONDS,
        lambda text: console.print(text, end="", markup=False, highlight=False, soft_wrap=True),
        speculates=speculates,
    )
    console.print("\n")
    return answer


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    arguments = build_parser().parse_args(argv)
    return exit_code_of(lambda: run(arguments, Console()))


if __name__ == "__main__":
    sys.exit(main())
