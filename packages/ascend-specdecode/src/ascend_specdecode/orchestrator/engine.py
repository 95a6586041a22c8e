"""The engine: requests in, events out, one task that runs step after step."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from types import TracebackType
from typing import Any, Generic, Self, cast

import anyio
import attrs
import numpy as np
from anyio.abc import TaskGroup

from ascend_specdecode.adaptive.controller import (
    AdaptiveK,
    FixedK,
    SpeculationPolicy,
    SpeculationReport,
)
from ascend_specdecode.errors import ArgumentError, EngineClosedError
from ascend_specdecode.observability.statistics import Statistics
from ascend_specdecode.observability.trace import Lane, Trace
from ascend_specdecode.orchestrator.calls import DraftCall, TargetCall
from ascend_specdecode.orchestrator.config import EngineConfig, Mode
from ascend_specdecode.orchestrator.deadlines import Deadlines
from ascend_specdecode.orchestrator.generation import Generation
from ascend_specdecode.orchestrator.lifetime import Lifetime
from ascend_specdecode.orchestrator.scheduler import Scheduler
from ascend_specdecode.orchestrator.step import Stepper
from ascend_specdecode.protocols import (
    Drafter,
    ObservingDrafter,
    ScoresT,
    SizedTarget,
    Target,
    TreeDrafter,
    TreeTarget,
    TreeVerifier,
    Verifier,
)
from ascend_specdecode.requests import (
    Cancelled,
    CancelReason,
    Ending,
    Finished,
    Request,
    Tokens,
)
from ascend_specdecode.sequences import SequenceOrigin, TokenBuffer
from ascend_specdecode.verifiers import ExactVerifier


@attrs.frozen
class Completion:
    """All that a request produced.

    Attributes:
        tokens: its tokens.
        ending: how it ended; tokens before a cancellation or failure are exact all the same.
    """

    tokens: tuple[int, ...]
    ending: Ending


@attrs.frozen
class Load:
    """What an engine holds now.

    Attributes:
        running: requests that hold target state.
        waiting: requests that wait for a place.
        cached_tokens: positions of target state that are taken.
    """

    running: int
    waiting: int
    cached_tokens: int


class DraftVerify(Generic[ScoresT]):
    """Decodes many requests with one target and one drafter; the output is the target's own.

    ``async with DraftVerify(...) as engine`` runs it: every task it starts ends with the block.
    Leaving the block normally waits for the requests that are under way; leaving it with an
    exception cancels them. Works on asyncio and trio; use it from the task group of one event loop.

    Args:
        target: the model whose output is exact.
        drafter: who proposes; None decodes plainly.
        config: the settings.
        verifier: who decides what is emitted; by default :class:`ExactVerifier`, for targets that
            return :class:`Scores`.

    Attributes:
        config: the settings.
        statistics: what was counted so far.
        trace: the newest spans, where ``config.trace_capacity`` keeps some.

    Raises:
        ArgumentError: a part lacks a method of its protocol; or the drafter drafts trees, and the
            target or the verifier takes none.
    """

    def __init__(
        self,
        target: Target[ScoresT],
        drafter: Drafter | None = None,
        config: EngineConfig | None = None,
        *,
        verifier: Verifier[ScoresT] | None = None,
    ) -> None:
        self.config = config = EngineConfig() if config is None else config
        self.statistics = Statistics()
        self.trace = Trace(config.trace_capacity)
        pipelined = config.mode is Mode.PIPELINED
        decides = cast("Verifier[ScoresT]", ExactVerifier()) if verifier is None else verifier
        _check_methods(target, drafter, decides)
        trees = isinstance(drafter, TreeDrafter) and drafter.drafts_trees
        if trees:
            _check_trees(target, decides)
        self._vocabulary = target.vocabulary_size if isinstance(target, SizedTarget) else None
        self._policy = _policy(config, drafter, pipelined=pipelined, trees=trees)
        self._drafts = self._draft_call(drafter, trees=trees)
        observer = drafter if isinstance(drafter, ObservingDrafter) else None
        self._target = TargetCall(
            target, decides, observer, config.score_time_limit, self.statistics, self.trace
        )
        self._scheduler = Scheduler(config, self._preempted)
        self._stepper = Stepper(
            self._drafts, self._target, self._policy, self.statistics, pipelined=pipelined
        )
        self._seeds = random.Random(config.seed)  # noqa: S311 - sampling, not secrets
        self._numbers = itertools.count()
        self._ended: deque[Lifetime] = deque()
        self._state = "is not open yet"
        self._open = self._draining = False
        self._sleeper: anyio.Event | None = None

    async def __aenter__(self) -> Self:
        if self._open or self._draining:
            raise EngineClosedError("was opened before")
        self._deadlines = Deadlines()
        self._drained = anyio.Event()
        self._thread = threading.get_ident()
        self._group: TaskGroup = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._run)
        self._group.start_soon(self._deadlines.watch)
        self._open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._open, self._draining, self._state = False, True, "is closing"
        try:
            if error is None:
                self._wake()
                with anyio.move_on_after(self.config.drain_time_limit):
                    await self._drained.wait()
        finally:
            self._end_all()
            self._group.cancel_scope.cancel()
            # The group must see a cancellation that is its own; other errors stay as they are.
            seen = error if _has_cancellation(error) else None
            try:
                swallowed = await self._group.__aexit__(kind if seen else None, seen, traceback)
            finally:
                self._end_all()
                self._release_ended()
                self._state = "is closed"
        # Only the group's own cancellation may be swallowed, not what the caller's block raised.
        return swallowed if seen is not None else None

    def generate(self, request: Request) -> Generation:
        """Return the events of a request; iterating it submits the request.

        ``async for event in engine.generate(request)``: :class:`Tokens`, then one of
        :class:`Finished`, :class:`Cancelled` and :class:`Failed`.
        """
        return Generation(lambda: self._submit(request))

    async def complete(self, request: Request) -> Completion:
        """Run a request to its end and return all its tokens.

        Raises:
            EngineClosedError: the engine is not open.
            QueueFullError: too many requests wait and the engine is set to refuse.
            ArgumentError: the request can never fit the engine's limits.
        """
        tokens: list[int] = []
        async with self.generate(request) as generation:
            async for event in generation:
                if isinstance(event, Tokens):
                    tokens.extend(event.tokens)
        assert generation.ending is not None  # noqa: S101 - iteration ends with the ending
        return Completion(tuple(tokens), generation.ending)

    @property
    def load(self) -> Load:
        """How many requests and positions are held now."""
        scheduler = self._scheduler
        return Load(scheduler.running, scheduler.waiting, scheduler.cached_tokens)

    def speculation(self) -> SpeculationReport:
        """Return what is known about the worth of drafting: acceptance, costs, break-even."""
        return self._policy.report(self._scheduler.running)

    def _submit(self, request: Request) -> Lifetime:
        if not self._open:
            raise EngineClosedError(self._state)
        self._scheduler.check(len(request.prompt), request.max_new_tokens)
        if self._vocabulary is not None:
            _check_vocabulary(request, self._vocabulary)
        life = self._new_life(request, next(self._numbers))
        self._scheduler.submit(life)
        self._deadlines.add(life)
        self.statistics.prompt_tokens += life.length
        self._wake()
        return life

    def _draft_call(self, drafter: Drafter | None, *, trees: bool) -> DraftCall | None:
        config = self.config
        if drafter is None or not config.num_speculative_tokens:
            return None
        return DraftCall(
            drafter,
            config.draft_time_limit,
            config.draft_failure_limit,
            self.statistics,
            self.trace,
            trees=trees,
            vocabulary=self._vocabulary,
        )

    def _new_life(self, request: Request, number: int) -> Lifetime:
        buffer = TokenBuffer(request.prompt)
        drawn = self._seeds.getrandbits(63)
        seed = drawn if request.sampling.seed is None else request.sampling.seed
        origin = SequenceOrigin(number, buffer, len(buffer), request.sampling, seed)
        now = anyio.current_time()
        aging = self.config.aging
        # Waiting raises a request as fast as any other, so the order of two never changes.
        level = request.priority + (now / aging if aging is not None else 0.0)
        return Lifetime(
            request,
            str(number) if request.name is None else request.name,
            origin,
            order=(level, number),
            now=now,
            limit=self.config.max_queued_events,
            on_end=self._on_end,
            on_room=self._wake,
        )

    def _on_end(self, life: Lifetime) -> None:
        self._ended.append(life)
        self._wake()

    def _wake(self) -> None:
        # A request dropped by a garbage collection on another thread is seen at the next step.
        if self._sleeper is not None and threading.get_ident() == self._thread:
            self._sleeper.set()
            self._sleeper = None

    async def _run(self) -> None:
        """Run steps while there are any; sleep while there are none."""
        while True:
            self._release_ended()
            rows = self._scheduler.plan(self._policy.choose(self._scheduler.running))
            if rows:
                await self._stepper.run(rows)
                continue
            if self._draining and not self._scheduler.live():
                self._drained.set()
                return
            self._sleeper = anyio.Event()
            await self._sleeper.wait()

    def _release_ended(self) -> None:
        """Free the state of ended requests. Called where no target or drafter call runs."""
        while self._ended:
            life = self._ended.popleft()
            self._scheduler.release(life)
            self._deadlines.remove(life)
            self._target.free(life)
            if self._drafts is not None:
                self._drafts.forget(life)
            self._count(life)

    def _count(self, life: Lifetime) -> None:
        ending, now = life.ending, anyio.current_time()
        assert ending is not None  # noqa: S101 - only ended requests come here
        self.statistics.ended(ending)
        if isinstance(ending, Finished):
            self.statistics.request.observe(life.last_event - life.submitted)
        kind = type(ending).__name__.lower()
        self.trace.add(
            Lane.REQUEST, life.name, life.submitted, now,
            tokens=life.generated, prompt=life.origin.prompt_length, ending=kind,
            reason=ending.reason.value,
        )  # fmt: skip

    def _preempted(self, life: Lifetime) -> None:
        self.statistics.preemptions += 1
        self._target.free(life)
        if self._drafts is not None:
            self._drafts.forget(life)

    def _end_all(self) -> None:
        for life in self._scheduler.live():
            life.end(Cancelled(life.name, CancelReason.ENGINE_CLOSED))


def _policy(
    config: EngineConfig, drafter: Drafter | None, *, pipelined: bool, trees: bool
) -> SpeculationPolicy:
    k = config.num_speculative_tokens if drafter is not None else 0
    if config.adaptive is None or not k:
        return FixedK(k, pipelined=pipelined, trees=trees)
    return AdaptiveK(k, config.adaptive, pipelined=pipelined, trees=trees)


def _check_methods(target: Target[Any], drafter: Drafter | None, verifier: Verifier[Any]) -> None:
    wanted: list[tuple[str, object, tuple[str, ...]]] = [
        ("target", target, ("score", "roll_back", "free")),
        ("verifier", verifier, ("verify",)),
    ]
    if drafter is not None:
        wanted.append(("drafter", drafter, ("propose", "forget")))
    for name, part, methods in wanted:
        missing = [one for one in methods if not callable(getattr(part, one, None))]
        if missing:
            found = f"{type(part).__name__} without {', '.join(missing)}"
            raise ArgumentError(name, found, f"an object with {', '.join(methods)}")


def _check_trees(target: Target[Any], verifier: Verifier[Any]) -> None:
    takes = {
        "target": (target, isinstance(target, TreeTarget) and target.scores_trees),
        "verifier": (verifier, isinstance(verifier, TreeVerifier) and verifier.verifies_trees),
    }
    for name, (found, takes_trees) in takes.items():
        if not takes_trees:
            allowed = "one that takes trees, or a drafter that drafts none"
            raise ArgumentError(name, f"{type(found).__name__}, which takes no trees", allowed)


def _check_vocabulary(request: Request, size: int) -> None:
    """Refuse tokens that the target does not know: they would fail whoever shares their step."""
    allowed = f"token ids 0..V-1 (V = {size}, the target's)"
    largest = int(np.max(request.prompt))
    if largest >= size:
        raise ArgumentError("prompt", f"token {largest}", allowed)
    if max(request.sampling.logit_bias, default=-1) >= size:
        raise ArgumentError("logit_bias", f"token {max(request.sampling.logit_bias)}", allowed)


def _has_cancellation(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_has_cancellation(one) for one in error.exceptions)
    return isinstance(error, anyio.get_cancelled_exc_class())
