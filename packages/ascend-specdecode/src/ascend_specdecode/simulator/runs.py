"""One simulated run and what must hold after it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import anyio
import attrs
from anyio.abc import TaskGroup

from ascend_specdecode.errors import EngineClosedError, QueueFullError
from ascend_specdecode.orchestrator.config import EngineConfig
from ascend_specdecode.orchestrator.engine import DraftVerify
from ascend_specdecode.orchestrator.generation import Generation
from ascend_specdecode.requests import FailReason
from ascend_specdecode.simulator.clock import Backend, DeadlockError, check_backend, run_virtual
from ascend_specdecode.simulator.faults import LONG, Faults
from ascend_specdecode.simulator.models import (
    SimulatedDrafter,
    SimulatedScores,
    SimulatedTarget,
    SimulatedVerifier,
    SpinError,
)
from ascend_specdecode.simulator.outcomes import Facts, Outcome, violations
from ascend_specdecode.simulator.scenarios import Closing, Interest, Scenario, scenario

HANGS_AFTER: Final = 100 * LONG
"""Virtual seconds after which a run counts as hung; every injected delay is over long before."""

_MOST_CALLS: Final = 2_000  # of a model in one run; the longest good runs need about a hundred

MakeEngine: TypeAlias = Callable[
    [SimulatedTarget, SimulatedDrafter, EngineConfig, SimulatedVerifier],
    DraftVerify[SimulatedScores],
]
"""Makes the engine under test; a negative control makes a broken one."""


def make_engine(
    target: SimulatedTarget,
    drafter: SimulatedDrafter,
    config: EngineConfig,
    verifier: SimulatedVerifier,
) -> DraftVerify[SimulatedScores]:
    """Make the engine as a user would."""
    return DraftVerify(target, drafter, config, verifier=verifier)


@attrs.frozen
class RunResult:
    """A finished run.

    Attributes:
        seed: its seed.
        backend: the event loop it ran on.
        violations: what did not hold; empty for a good run.
        endings: how many of its requests ended how, ``kind/reason``.
        faults: faults that were injected.
        seconds: virtual time it took.
        log: what happened, in order, where it was kept.
    """

    seed: int
    backend: Backend
    violations: tuple[str, ...]
    endings: dict[str, int]
    faults: int
    seconds: float
    log: tuple[str, ...] = ()


class _AbortError(Exception):
    """Ends an engine's block, or a consumer's."""


class _Run:
    """The parts of a run."""

    def __init__(self, plan: Scenario, make: MakeEngine, *, keep_log: bool) -> None:
        self.plan = plan
        self.log: list[str] = []
        self.outcomes = [Outcome(consumer) for consumer in plan.consumers]
        self.violations: list[str] = []
        self.seconds = 0.0
        self._keep_log = keep_log
        generator = random.Random(plan.seed)  # noqa: S311 - repeatable on purpose
        self.faults = Faults(plan.rates, generator, self._say)
        point = self.faults.point
        self.target = SimulatedTarget(
            lambda batch: plan.score_seconds, point("target"), point("target, computed")
        )
        self.drafter = SimulatedDrafter(
            plan.chance,
            lambda k, rows: plan.draft_seconds * k,
            seed=plan.seed,
            branches=plan.branches,
            before=point("drafter"),
            observing=point("drafter, observing"),
        )
        self.target.watched.most_calls = self.drafter.watched.most_calls = _MOST_CALLS
        verifier = SimulatedVerifier(point("verifier"))
        self.engine = make(self.target, self.drafter, plan.config, verifier)

    async def main(self) -> None:
        self._say(f"settings: {self.plan.config}")
        for consumer in self.plan.consumers:
            self._say(f"consumer: {consumer}")
        start = anyio.current_time()
        try:
            with anyio.fail_after(HANGS_AFTER):
                await self._open_and_close()
        except TimeoutError:
            self.violations.append(f"hung: not over after {HANGS_AFTER:g} virtual seconds")
        self.seconds = anyio.current_time() - start

    def found(self) -> tuple[str, ...]:
        """Everything that did not hold."""
        facts = Facts(
            self.plan.config, self.plan.closing, self._blamed(), self.engine.statistics.endings
        )
        models = (*self.target.violations, *self.drafter.violations)
        return (*self.violations, *dict.fromkeys(models), *violations(self.outcomes, facts))

    def _say(self, text: str) -> None:
        if self._keep_log:
            self.log.append(f"{anyio.current_time():9.3f} s  {text}")

    def _blamed(self) -> dict[FailReason, set[int]]:
        streams = self.target.streams
        blamed: dict[FailReason, set[int]] = {}
        for where, numbers in self.faults.blamed.items():
            verifier = where.startswith("verifier")
            reason = FailReason.VERIFIER_ERROR if verifier else FailReason.TARGET_ERROR
            blamed.setdefault(reason, set()).update(streams.get(one, -1) for one in numbers)
        return blamed

    async def _open_and_close(self) -> None:
        async with anyio.create_task_group() as outside:
            with anyio.CancelScope() as scope, contextlib.suppress(_AbortError):
                await self._use_engine(outside, scope)
                if self.plan.closing is Closing.ERROR:
                    self.violations.append("the engine's block swallowed an exception")
            self._check_closed()

    async def _use_engine(self, outside: TaskGroup, scope: anyio.CancelScope) -> None:
        closing = self.plan.closing
        async with self.engine:
            with _single(_AbortError):
                async with anyio.create_task_group() as inside:
                    group = outside if closing is Closing.EARLY else inside
                    for outcome in self.outcomes:
                        group.start_soon(self._consume, outcome)
                    if closing is not Closing.DRAIN:
                        await anyio.sleep(self.plan.closing_time)
                        self._say(f"the engine's block is left: {closing}")
                    if closing is Closing.CANCEL:
                        scope.cancel()
                    if closing is Closing.ERROR:
                        raise _AbortError

    async def _consume(self, outcome: Outcome) -> None:
        consumer = outcome.consumer
        outcome.swept = True  # until it ends in any other way
        await anyio.sleep(consumer.start)
        generation = self.engine.generate(consumer.request)
        try:
            if consumer.interest is Interest.CANCEL:
                with anyio.move_on_after(consumer.patience) as scope:
                    await self._listen(generation, outcome)
                outcome.left = scope.cancelled_caught
            else:
                await self._listen(generation, outcome)
            outcome.swept = False
        except (EngineClosedError, QueueFullError) as error:
            outcome.refused, outcome.swept = error, False
        except _AbortError:
            outcome.left, outcome.swept = True, False
        finally:
            outcome.asked, outcome.pending = generation.submitted, generation.pending
            verdict = outcome.refused or ("left" if outcome.left else "done")
            self._say(f"{outcome.name}: {verdict}")

    async def _listen(self, generation: Generation, outcome: Outcome) -> None:
        interest, patience = outcome.consumer.interest, outcome.consumer.patience
        if interest is Interest.RAISE:
            async with generation:
                async for event in generation:
                    self._got(outcome, event)
                    if len(outcome.events) > patience:
                        raise _AbortError
            return
        async for event in generation:
            self._got(outcome, event)
            if interest is Interest.SLOW:
                await anyio.sleep(patience)
            if interest is Interest.BREAK and len(outcome.events) > patience:
                outcome.left = True
                return

    def _got(self, outcome: Outcome, event: object) -> None:
        outcome.events.append(event)  # type: ignore[arg-type]
        self._say(f"{outcome.name} gets {event}")

    def _check_closed(self) -> None:
        load = self.engine.load
        if load.running or load.waiting or load.cached_tokens:
            self.violations.append(f"leak: the closed engine holds {load}")
        if self.target.held:
            self.violations.append(f"leak: the target holds sequences {sorted(self.target.held)}")
        known = self.drafter.known | set(self.drafter.seen)
        if known:
            self.violations.append(f"leak: the drafter knows sequences {sorted(known)}")
        if self.target.watched.busy or self.drafter.watched.busy:
            self.violations.append("leak: a call is still running after the engine's block")


@contextlib.contextmanager
def _single(kind: type[Exception]) -> Iterator[None]:
    """Take an exception out of the group that a task group puts it in."""
    try:
        yield
    except* kind as group:
        raise group.exceptions[0] from None


def run(
    seed: int,
    backend: Backend = "asyncio",
    *,
    make: MakeEngine = make_engine,
    keep_log: bool = False,
) -> RunResult:
    """Run the scenario of a seed and look at everything that must hold.

    Args:
        seed: names the scenario and all its faults.
        backend: the event loop.
        make: makes the engine.
        keep_log: also keep what happened, for a replay.

    Raises:
        ArgumentError: the backend is unknown or not installed.
    """
    check_backend(backend)
    one = _Run(scenario(seed), make, keep_log=keep_log)
    found: tuple[str, ...]
    try:
        run_virtual(one.main, backend, seed=seed)
        found = one.found()
    except DeadlockError as error:
        found = (f"hung: {error}",)
    except (Exception, BaseExceptionGroup, SpinError) as error:  # noqa: BLE001 - it is a finding
        found = (*one.found(), f"{type(error).__name__} escaped: {error}")
    endings = {"/".join(key): count for key, count in one.engine.statistics.endings.items()}
    return RunResult(seed, backend, found, endings, one.faults.count, one.seconds, tuple(one.log))
