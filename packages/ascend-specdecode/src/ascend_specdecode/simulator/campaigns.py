"""Many simulated runs, and what they found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import attrs

from ascend_specdecode.simulator.clock import Backend
from ascend_specdecode.simulator.runs import MakeEngine, RunResult, make_engine, run


@attrs.frozen
class Campaign:
    """The sum of many runs.

    Attributes:
        runs: how many there were.
        faults: faults injected over all runs.
        endings: requests by ending, ``kind/reason``.
        seconds: virtual time over all runs.
        failed: the runs in which something did not hold.
    """

    runs: int
    faults: int
    endings: dict[str, int]
    seconds: float
    failed: tuple[RunResult, ...]

    @classmethod
    def of(cls, results: Iterable[RunResult]) -> Self:
        """Sum results up; only failed ones are kept."""
        runs, faults, seconds = 0, 0, 0.0
        endings: Counter[str] = Counter()
        failed = []
        for result in results:
            runs += 1
            faults += result.faults
            seconds += result.seconds
            endings.update(result.endings)
            if result.violations:
                failed.append(result)
        return cls(runs, faults, dict(sorted(endings.items())), seconds, tuple(failed))

    def as_dict(self) -> dict[str, Any]:
        """Return the campaign as plain data, failed runs with the command that replays each."""
        data = attrs.asdict(self, filter=attrs.filters.exclude("failed"))
        failed = [attrs.asdict(one) | {"replay": replay_command(one)} for one in self.failed]
        return data | {"failed": failed}

    def explain(self) -> str:
        """Return one line for each violation and each replay command; empty for a good campaign."""
        lines = []
        for one in self.failed:
            lines += [f"seed {one.seed} ({one.backend}): {text}" for text in one.violations]
            lines.append(f"  replay: {replay_command(one)}")
        return "\n".join(lines)


def replay_command(result: RunResult) -> str:
    """Return the command line that runs a seed again and prints what happened."""
    return f"ascend-specdecode simulate --seed {result.seed} --backend {result.backend} --replay"


def campaign(
    seeds: Iterable[int],
    backend: Backend = "asyncio",
    *,
    make: MakeEngine = make_engine,
    done: Callable[[RunResult], None] | None = None,
) -> Campaign:
    """Run the scenario of every seed.

    Args:
        seeds: the seeds.
        backend: the event loop.
        make: makes the engines; a negative control makes broken ones.
        done: told of every finished run.

    Raises:
        ArgumentError: the backend is unknown or not installed.
    """

    def results() -> Iterator[RunResult]:
        for seed in seeds:
            result = run(seed, backend, make=make)
            if done is not None:
                done(result)
            yield result

    return Campaign.of(results())
