"""Load vLLM's server with the plugin for a while, and see that nothing breaks, grows or stays.

64 clients stream completions of the tiny GLM (sparse latent attention) from `ascend-vllm serve` in
simulate mode; some leave in the middle. Memory must be flat in loads of four minutes and more. A
client of long streams is killed, and what they held must be free before they could have ended. Then
the server is killed with SIGKILL, nothing of it may stay, and it is started once more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
from ascend_demo.errors import ToolError
from ascend_demo.launch import check_environment, routing_file, simulation
from ascend_demo.progress import print_error
from ascend_demo.server import HOST, RunningServer, ServerSettings, choose_port, serving
from ascend_soak import watch
from ascend_soak.killed_clients import kill_clients
from ascend_soak.load import Load, Tally, run_load

MODEL: Final = Path(__file__).parent.parent / "assets" / "tiny_glm"
NAME: Final = "tiny-glm"
DRAIN_SECONDS: Final = 60.0
GUARD_SECONDS: Final = 2 * DRAIN_SECONDS
"""How long the guard leaves alone what a killed server leaves: the server itself is judged."""
BLOCKS: Final = 128  # of 128 tokens: few, so that all were touched before memory is compared
LENGTH: Final = 8192
"""Beyond what the model was trained for: what it says does not matter, how long it takes does."""
JUDGED_SECONDS: Final = 240.0
"""Shorter loads report memory and do not judge it: allocators and caches still fill."""
EPILOG: Final = """\
examples:
  nox -s soak                              five minutes, 64 clients
  nox -s soak -- --seconds 60 --json soak.json
  python tools/soak.py --clients 8 --seconds 20 --leaving 0.5

exit codes: 0 everything held, 1 something did not or the server failed, 2 bad usage
"""


@attrs.define
class Findings:
    """What the soak found.

    Attributes:
        problems: what did not hold, one line each.
        numbers: what was counted, for people and --json.
    """

    problems: list[str] = attrs.field(factory=list)
    numbers: dict[str, Any] = attrs.field(factory=dict)

    def require(self, holds: bool, problem: str) -> None:
        """Note a problem unless something holds."""
        if not holds:
            self.problems.append(problem)


def settings(port: int, profile: str, work: Path) -> ServerSettings:
    """The server: every client can run at the same time."""
    options = {
        "--profile": profile,
        "--served-model-name": NAME,
        "--host": HOST,
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": str(LENGTH),
        "--hf-overrides": json.dumps({"max_position_embeddings": LENGTH}),
        "--max-num-seqs": "64",
        "--num-gpu-blocks-override": str(BLOCKS),
        "--distributed-executor-backend": "mp",  # a worker, with shared memory to leave behind
    }
    flat = [word for option in options.items() for word in option]
    command = (sys.executable, "-m", "ascend_vllm_plugin", "serve", str(MODEL))
    return ServerSettings(
        command=(*command, *flat, "--enforce-eager"),
        environment={**os.environ, **simulation(profile, routing_file(work))},
        port=port,
        log=work / "server.log",
        ready_seconds=600.0,
        leftover_seconds=GUARD_SECONDS,
    )


def soak(server: RunningServer, load: Load, found: Findings, tell: Callable[..., None]) -> None:
    """Load the server and note what did not hold."""
    with watch.sampled_memory(server.pid) as samples:
        tally = asyncio.run(run_load(load, tell))
    left = watch.wait_until_free(server.url, DRAIN_SECONDS)
    _judge(tally, found)
    found.require(not left, f"after {DRAIN_SECONDS:.0f} s without clients the server holds {left}")
    found.require(server.ended() is None, "the server ended under load")
    killed = kill_clients(server.url, NAME, DRAIN_SECONDS)
    found.numbers |= killed.numbers()
    found.problems += killed.problems()
    sides = watch.growth(samples)
    if sides is not None:
        early, late = sides
        found.numbers["memory_mib"] = [early >> 20, late >> 20]
        found.numbers["memory_judged"] = load.seconds >= JUDGED_SECONDS
        found.require(
            load.seconds < JUDGED_SECONDS or watch.is_flat(early, late),
            f"memory grew from {early >> 20} to {late >> 20} MiB",
        )


def _judge(tally: Tally, found: Findings) -> None:
    found.numbers |= {
        "finished": tally.finished,
        "left_in_the_middle": tally.left,
        "pieces": tally.tokens,
        "errors": len(tally.errors),
    }
    if tally.seconds:
        found.numbers["median_seconds"] = round(statistics.median(tally.seconds), 2)
    found.require(tally.finished > 0, "no stream finished")
    for line in sorted(set(tally.errors)):
        found.problems.append(f"{tally.errors.count(line)} x {line}")


def kill_and_look(server: RunningServer, found: Findings) -> None:
    """Kill the server's main process and see that nothing of it stays.

    The guard must leave alone what is looked for: `ServerSettings.leftover_seconds`.
    """
    shared = watch.shared_memory(server.pid)
    found.numbers["shared_memory_segments"] = len(shared)
    os.kill(server.pid, signal.SIGKILL)
    killed = time.monotonic()
    left = watch.wait_until_gone(server.pid, DRAIN_SECONDS)
    found.numbers["seconds_until_gone"] = round(time.monotonic() - killed, 1)
    found.require(not left, f"processes {left} outlived SIGKILL of the server")
    # They are removed by the last of the processes, if at all; and the guard waits no longer.
    stale = [path.name for path in watch.wait_until_removed(shared, 1.0)]
    found.require(not stale, f"shared memory {stale} outlived SIGKILL of the server")


def run(options: argparse.Namespace) -> Findings:
    """Run everything.

    Raises:
        ToolError: the server could not be started.
    """
    check_environment(options.profile)
    found = Findings()
    port = choose_port(options.port)
    shape = (options.clients, options.seconds, options.leaving, options.seed)
    with tempfile.TemporaryDirectory(prefix="ascend-soak-") as folder:
        chosen = settings(port, options.profile, Path(folder))
        with serving(chosen, _starting) as server:
            soak(server, Load(server.url, NAME, *shape), found, _progress)
            kill_and_look(server, found)
        with serving(chosen, _starting) as server:  # the same port is free again
            once = Load(server.url, NAME, 1, 1.0, 0.0, options.seed)
            again = asyncio.run(run_load(once, lambda *_: None))
            found.require(again.finished > 0, f"after the restart: {again.errors or 'no answer'}")
    return found


def _starting(seconds: float, line: str) -> None:
    _line(f"starting, {seconds:.0f} s: {line[:80]}")


def _progress(tally: Tally, left: float) -> None:
    counts = f"{tally.finished} finished, {tally.left} left, {len(tally.errors)} errors"
    _line(f"{left:.0f} s to go: {counts}")


def _line(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seconds", type=_positive, default=300.0, help="of load (default 300)")
    made.add_argument("--clients", type=_count, default=64, help="at the same time (default 64)")
    made.add_argument("--leaving", type=_share, default=0.2, help="share that leaves (default 0.2)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--port", type=_count, help="default: a free port")
    made.add_argument("--profile", default="A5", help="SoC or family to simulate (default A5)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    return made


def _positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"found {text}, allowed seconds above 0")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"found {text}, allowed whole numbers from 1")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"found {text}, allowed a number in 0..1")
    return value


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = parser().parse_args(argv)
    try:
        found = run(options)
    except ToolError as error:
        print_error(str(error))
        return error.exit_code
    _line("")
    for name, value in found.numbers.items():
        print(f"{name:<22}{value}")
    for problem in found.problems:
        print(f"PROBLEM: {problem}")
    print("everything held" if not found.problems else f"{len(found.problems)} problems")
    if options.json is not None:
        document = attrs.asdict(found)
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(bool(found.problems))


if __name__ == "__main__":
    sys.exit(main())
