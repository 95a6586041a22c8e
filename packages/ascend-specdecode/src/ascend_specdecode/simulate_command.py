"""``ascend-specdecode simulate``: look for lost tokens under faults, or compare schedules."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

import attrs

from ascend_hwprofile import profile_for
from ascend_hwprofile.report import Report, Table, table, write
from ascend_specdecode.adaptive.config import AdaptiveConfig
from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.observability.summary import Summary
from ascend_specdecode.orchestrator.config import EngineConfig, Mode
from ascend_specdecode.simulator import (
    Backend,
    Campaign,
    SpeedResult,
    Workload,
    campaign,
    decode_cost,
    measure_speed,
    model_shapes,
    run,
)

_EXAMPLES = """\
Without --speed: runs small scenarios with random settings, requests, delays, errors, hangs and
cancellations in virtual time, and checks that no token is lost or doubled, no state leaks, nothing
hangs and every request has one ending. A seed names a scenario and all its faults.

With --speed: what k = 0, fixed k and adaptive k give in lockstep and pipelined mode, with the
costs of a hardware profile. The figures are simulated.

examples:
  ascend-specdecode simulate --runs 1000 --backend trio
  ascend-specdecode simulate --seed 17 --replay
  ascend-specdecode simulate --speed --profile Ascend910B4 --target qwen3-8b --draft qwen3-0_6b
  ascend-specdecode simulate --speed --acceptance 0.5 --k 6 --requests 64 --json
  ascend-specdecode simulate --speed --trace pipelined.json   (open it in ui.perfetto.dev)

exit codes:
  0  done, nothing found
  1  something did not hold; the seed and the command that replays it are printed
  2  bad usage
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "simulate",
        help="faults or schedules in virtual time",
        description="Run the engine in virtual time.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--backend", choices=get_args(Backend), default="asyncio")
    faults = parser.add_argument_group("faults")
    faults.add_argument("--seed", type=int, default=0, help="first seed (default 0)")
    faults.add_argument("--runs", type=int, default=200, help="seeds to run (default 200)")
    faults.add_argument("--replay", action="store_true", help="run --seed, print what happens")
    speed = parser.add_argument_group("schedules (--speed)")
    speed.add_argument("--speed", action="store_true", help="compare schedules instead")
    _add_speed_options(speed)
    parser.set_defaults(run=_simulate)


def _add_speed_options(group: argparse._ArgumentGroup) -> None:
    shapes = ", ".join(model_shapes())
    group.add_argument("--profile", default="A5", metavar="SOC", help="SoC or family (default A5)")
    group.add_argument("--bandwidth", type=float, metavar="GB/S", help="instead of the profile's")
    group.add_argument("--target", default="qwen3-8b", metavar="MODEL", help=f"one of {shapes}")
    group.add_argument("--draft", default="qwen3-0_6b", metavar="MODEL", help="as --target")
    group.add_argument("--dtype", default="bfloat16", help="of the weights (default bfloat16)")
    group.add_argument(
        "--host-ms", type=float, default=1.0, help="host time of each call (default 1)"
    )
    group.add_argument("--acceptance", type=float, default=0.8, help="of a drafted token")
    group.add_argument("--k", type=int, default=4, help="drafted tokens (default 4)")
    group.add_argument("--requests", type=int, default=16, help="at the same time (default 16)")
    group.add_argument("--prompt", type=int, default=512, help="tokens of each (default 512)")
    group.add_argument("--tokens", type=int, default=256, help="to generate (default 256)")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the pipelined run as a Chrome trace"
    )


def _simulate(options: argparse.Namespace) -> int:
    if options.speed:
        write(_speed(options), as_json=options.json)
        return 0
    if options.replay:
        return _replay(options)
    if options.runs < 1:
        raise ArgumentError("--runs", options.runs, "at least 1")
    seeds = range(options.seed, options.seed + options.runs)
    found = campaign(seeds, options.backend)
    write(_campaign_report(found, options.backend), as_json=options.json)
    return int(bool(found.failed))


def _replay(options: argparse.Namespace) -> int:
    result = run(options.seed, options.backend, keep_log=True)
    document = Campaign.of([result]).as_dict() | {"log": list(result.log)}
    verdict = "\n".join(result.violations) or "everything held"
    lines = [f"seed {result.seed} on {result.backend}", *result.log, verdict]
    write(Report(document, ("\n".join(lines),)), as_json=options.json)
    return int(bool(result.violations))


def _campaign_report(found: Campaign, backend: str) -> Report:
    rows = [
        ("runs", f"{found.runs} on {backend}"),
        ("virtual seconds", f"{found.seconds:.0f}"),
        ("faults injected", found.faults),
        *found.endings.items(),
        ("runs with violations", len(found.failed)),
    ]
    parts: tuple[Table | str, ...] = (table("simulated runs", ("what", "count"), rows),)
    if found.failed:
        parts += (found.explain(),)
    return Report(found.as_dict(), parts)


def _speed(options: argparse.Namespace) -> Report:
    workload = Workload(options.requests, options.prompt, options.tokens, options.acceptance)
    if not 0.0 <= options.acceptance <= 1.0:
        raise ArgumentError("--acceptance", options.acceptance, "a number in 0..1")
    results = {
        name: _measure(options, workload, config) for name, config in _configs(options.k).items()
    }
    if options.trace is not None:
        results["pipelined"].trace.write(options.trace)
    plain = results["k = 0"].tokens_per_second
    summaries = {
        name: Summary.of(
            result.statistics,
            result.seconds,
            plain_tokens_per_second=plain,
            speculation=result.speculation,
        )
        for name, result in results.items()
    }
    profile = profile_for(options.profile)
    title = f"{options.target} on {profile.soc_name}, {options.requests} requests (simulated)"
    rows = [_row(name, summary) for name, summary in summaries.items()]
    headers = ("schedule", "tokens/s", "speed-up", "acceptance length", "k at the end")
    document: dict[str, Any] = {
        "soc": profile.soc_name,
        "simulated": True,
        "schedules": {name: summary.as_dict() for name, summary in summaries.items()},
    }
    detail = summaries["adaptive"].tables()
    return Report(document, (table(title, headers, rows), *detail[1:]))


def _configs(k: int) -> dict[str, EngineConfig]:
    lockstep = EngineConfig(num_speculative_tokens=k, adaptive=None, draft_time_limit=None)
    schedules: dict[str, dict[str, Any]] = {
        "k = 0": {"num_speculative_tokens": 0},
        "lockstep": {},
        "pipelined": {"mode": Mode.PIPELINED, "trace_capacity": 100_000},
        "adaptive": {"adaptive": AdaptiveConfig()},
        "adaptive, pipelined": {"adaptive": AdaptiveConfig(), "mode": Mode.PIPELINED},
    }
    return {name: attrs.evolve(lockstep, **changes) for name, changes in schedules.items()}


def _measure(options: argparse.Namespace, workload: Workload, config: EngineConfig) -> SpeedResult:
    cost, draft = (
        decode_cost(
            options.profile,
            model,
            dtype=options.dtype,
            host_seconds=options.host_ms / 1e3,
            bandwidth_gbps=options.bandwidth,
        )
        for model in (options.target, options.draft)
    )
    context = workload.prompt + workload.tokens // 2
    return measure_speed(
        workload,
        config,
        score_seconds=cost.score,
        draft_seconds=draft.draft(context),
        backend=options.backend,
    )


def _row(name: str, summary: Summary) -> tuple[object, ...]:
    known = summary.speculation
    return (
        name,
        f"{summary.tokens_per_second:.1f}",
        f"{summary.speed_up:.2f}" if summary.speed_up is not None else None,
        f"{summary.acceptance_length:.2f}" if summary.drafts else "-",
        known.k if known is not None else None,
    )
