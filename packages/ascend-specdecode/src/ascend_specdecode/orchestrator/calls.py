"""Calls into drafter, target and verifier: time limits, errors, and checks of what comes back.

What a drafter does wrong costs drafts; what a target or verifier does wrong ends requests, and only
those of the call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Generic

import anyio
import attrs
from torch import Tensor

from ascend_specdecode.drafted_paths import is_path, tree_fault
from ascend_specdecode.errors import DrafterError, ProtocolError, TargetError
from ascend_specdecode.observability.statistics import Statistics
from ascend_specdecode.observability.trace import Lane, Trace
from ascend_specdecode.orchestrator.lifetime import Lifetime
from ascend_specdecode.protocols import (
    NOTHING,
    DraftedSequence,
    Drafter,
    ObservingDrafter,
    Proposal,
    ScoresT,
    Target,
    Verifier,
)
from ascend_specdecode.requests import Failed, FailReason
from ascend_specdecode.sequences import SequenceState

_log = logging.getLogger("ascend_specdecode")
_log.addHandler(logging.NullHandler())  # silent unless the program configures logging


@attrs.define(eq=False)
class DraftCall:
    """The drafter behind its limits.

    Attributes:
        drafter: who proposes.
        time_limit: seconds for one call.
        failure_limit: lost drafts after which a request goes on without.
        statistics: where losses are counted.
        trace: where calls are drawn.
        trees: whether proposals may be trees.
        vocabulary: tokens that the target knows, None where it does not say.
        seconds: how long the last call took.
    """

    drafter: Drafter
    time_limit: float | None
    failure_limit: int
    statistics: Statistics
    trace: Trace
    trees: bool = False
    vocabulary: int | None = None
    seconds: float = 0.0

    async def propose(
        self,
        lives: Sequence[Lifetime],
        states: Sequence[SequenceState],
        k: int,
        worth: float | None,
        lane: Lane = Lane.DRAFT,
    ) -> list[Proposal]:
        """Draft up to ``k`` tokens after each state; nothing where the drafter fails or is late.

        A draft that takes longer than ``worth`` seconds is given up, but held against nobody.
        """
        start = anyio.current_time()
        found: Sequence[Proposal] | None = None
        outcome = "cancelled"
        limits = [one for one in (self.time_limit, worth) if one is not None]
        try:
            with _limit(min(limits, default=None)) as scope:
                found = await self.drafter.propose(states, k)
            if scope is not None and scope.cancelled_caught:
                outcome = "late"
                self.statistics.draft_timeouts += len(lives)
                if self.time_limit is not None and self.time_limit == min(limits):
                    self._lost(lives)
                return [NOTHING] * len(lives)
            outcome = "drafted"
            proposals = self._checked(found, lives, k)
        except DrafterError as error:
            outcome = "error"
            named = [life for life in lives if life.id in error.sequence_ids]
            self.failed(named or lives, error)
            proposals = [NOTHING] * len(lives)
        except Exception as error:  # noqa: BLE001 - a drafter may fail in any way; it is counted
            outcome = "error"
            self.failed(lives, error)
            proposals = [NOTHING] * len(lives)
        finally:
            end = anyio.current_time()
            self.seconds = end - start
            self.statistics.draft_seconds += self.seconds
            self.trace.add(lane, outcome, start, end, batch=len(lives), k=k)
        return proposals

    def forget(self, life: Lifetime) -> None:
        """Drop the drafter's state of a request."""
        try:
            self.drafter.forget(life.id)
        except Exception:  # noqa: BLE001 - the request has ended; it is logged and counted
            self.statistics.release_errors += 1
            _log.exception("the drafter failed to forget sequence %d", life.id)

    def _checked(
        self, found: Sequence[Proposal] | None, lives: Sequence[Lifetime], k: int
    ) -> list[Proposal]:
        if not isinstance(found, Sequence):
            raise ProtocolError(f"the drafter returned {type(found).__name__}, not a sequence")
        if len(found) != len(lives):
            raise ProtocolError(f"the drafter returned {len(found)} proposals for {len(lives)}")
        proposals = list(found)
        for index, proposal in enumerate(proposals):
            fault = self._fault(proposal, k)
            if fault is not None:
                self.failed([lives[index]], ProtocolError(fault))
                proposals[index] = NOTHING
        return proposals

    def _fault(self, proposal: Proposal, k: int) -> str | None:
        """Say what a target must never see: too many tokens, ids that are none, a broken tree."""
        if not isinstance(proposal, Proposal):
            return f"{type(proposal).__name__}, not a Proposal"
        tokens, probabilities, size = proposal.tokens, proposal.probabilities, self.vocabulary
        if len(tokens) > k:
            return f"{len(tokens)} drafted tokens, k is {k}"
        if tokens and min(tokens) < 0:
            return f"the drafted id {min(tokens)} is not a token"
        if tokens and size is not None and max(tokens) >= size:
            return f"the drafted id {max(tokens)} is not a token, the target has {size}"
        if not isinstance(probabilities, Tensor | None):
            return f"probabilities of type {type(probabilities).__name__}, not a tensor"
        if probabilities is not None and len(probabilities) != len(tokens):
            return f"{len(probabilities)} rows of probabilities for {len(tokens)} drafted tokens"
        if proposal.parents is None:
            return None
        if not self.trees:
            return "a tree from a drafter without drafts_trees = True"
        return tree_fault(proposal)

    def failed(self, lives: Iterable[Lifetime], error: Exception) -> None:
        """Count drafts lost to an error of the drafter."""
        lost = list(lives)
        self.statistics.draft_errors += len(lost)
        _log.warning("drafting failed for %d requests: %r", len(lost), error)
        self._lost(lost)

    def _lost(self, lives: Iterable[Lifetime]) -> None:
        for life in lives:
            life.failures += 1
            if life.failures >= self.failure_limit and not life.plain:
                life.plain = True
                self.statistics.degraded_requests += 1


@attrs.frozen(eq=False)
class Verified(Generic[ScoresT]):
    """A batch that was scored and verified, row by row."""

    lives: Sequence[Lifetime]
    batch: Sequence[DraftedSequence]
    scores: ScoresT
    emitted: Sequence[Sequence[int]]


@attrs.define(eq=False)
class TargetCall(Generic[ScoresT]):
    """The target and the verifier behind their limits.

    Attributes:
        target: who scores.
        verifier: who decides what is emitted.
        observer: the drafter, where it learns from scores.
        time_limit: seconds for one ``score``.
        statistics: where calls are counted.
        trace: where calls are drawn.
        seconds: how long the last ``score`` and ``verify`` took together.
    """

    target: Target[ScoresT]
    verifier: Verifier[ScoresT]
    observer: ObservingDrafter[ScoresT] | None
    time_limit: float | None
    statistics: Statistics
    trace: Trace
    seconds: float = 0.0

    async def score(
        self, lives: Sequence[Lifetime], batch: Sequence[DraftedSequence]
    ) -> ScoresT | None:
        """Score a batch; None where the call failed, and its requests then know why."""
        start = anyio.current_time()
        try:
            with _limit(self.time_limit) as scope:
                return await self.target.score(batch)
            if scope is not None and scope.cancelled_caught:
                self._fail_late(lives)
            return None
        except TargetError as error:
            self._fail_named(lives, error)
            return None
        except Exception as error:  # noqa: BLE001 - a target may fail in any way; its requests end
            _fail(lives, FailReason.TARGET_ERROR, error)
            return None
        finally:
            end = anyio.current_time()
            self.seconds = end - start
            self.statistics.score_seconds += self.seconds
            if self.trace.enabled:
                drafted = sum(len(row.proposal.tokens) for row in batch)
                self.trace.add(Lane.SCORE, "score", start, end, batch=len(batch), drafted=drafted)

    async def verify(
        self,
        lives: Sequence[Lifetime],
        batch: Sequence[DraftedSequence],
        scores: ScoresT,
        drafts: DraftCall | None,
    ) -> Sequence[Sequence[int]] | None:
        """Decide what the batch emits; None where the verifier failed, which ends its requests."""
        start = anyio.current_time()
        try:
            emitted = await self._emitted(lives, batch, scores, drafts)
        except TargetError as error:
            self._fail_named(lives, error)
            return None
        except Exception as error:  # noqa: BLE001 - a verifier may fail in any way; requests end
            _fail(lives, FailReason.VERIFIER_ERROR, error)
            return None
        finally:
            end = anyio.current_time()
            self.seconds += end - start
            self.statistics.verify_seconds += end - start
            self.trace.add(Lane.VERIFY, "verify", start, end, batch=len(batch))
        self.statistics.steps += 1
        return emitted

    async def _emitted(
        self,
        lives: Sequence[Lifetime],
        batch: Sequence[DraftedSequence],
        scores: ScoresT,
        drafts: DraftCall | None,
    ) -> Sequence[Sequence[int]]:
        """Ask the verifier; drafts that it refuses are counted, and it is asked without them."""
        while True:
            try:
                emitted = await self.verifier.verify(batch, scores)
            except DrafterError as error:
                refused = [life for life in lives if life.id in error.sequence_ids]
                batch, held = _without_drafts(batch, error.sequence_ids), batch
                if drafts is None or batch == held:
                    raise ProtocolError(
                        f"drafts were refused that there are not: {error}"
                    ) from error
                drafts.failed(refused, error)
            else:
                _check_emitted(batch, emitted)
                return emitted

    async def observe(self, verified: Verified[ScoresT], drafts: DraftCall) -> None:
        """Let the drafter learn from a scored batch, where it wants to."""
        if self.observer is None:
            return
        try:
            await self.observer.observe(verified.batch, verified.scores, verified.emitted)
        except Exception as error:  # noqa: BLE001 - as `propose`: it costs drafts, not requests
            drafts.failed(verified.lives, error)

    def roll_back(self, life: Lifetime, length: int) -> None:
        """Give back the target's state beyond ``length`` tokens."""
        life.cached = length
        try:
            self.target.roll_back(life.id, length)
        except Exception as error:  # noqa: BLE001 - its state is unknown now: the request ends
            _fail([life], FailReason.TARGET_ERROR, error)

    def free(self, life: Lifetime) -> None:
        """Drop the target's state of a request."""
        try:
            self.target.free(life.id)
        except Exception:  # noqa: BLE001 - the request has ended; it is logged and counted
            self.statistics.release_errors += 1
            _log.exception("the target failed to free sequence %d", life.id)

    def _fail_named(self, lives: Sequence[Lifetime], error: TargetError) -> None:
        """Fail the requests that the error names; the others take the same step again."""
        named = [life for life in lives if life.id in error.sequence_ids]
        _fail(named or lives, FailReason.TARGET_ERROR, error)
        # How far the failed call got is unknown: what it may have added goes.
        for life in lives:
            if life.ending is None:
                self.roll_back(life, life.cached)

    def _fail_late(self, lives: Iterable[Lifetime]) -> None:
        detail = f"the target took more than {self.time_limit:g} s for one step"
        for life in lives:
            life.end(Failed(life.name, FailReason.STEP_TIME_LIMIT, detail))


def _limit(seconds: float | None) -> contextlib.AbstractContextManager[anyio.CancelScope | None]:
    return contextlib.nullcontext() if seconds is None else anyio.move_on_after(seconds)


def _fail(lives: Iterable[Lifetime], reason: FailReason, error: Exception) -> None:
    for life in lives:
        life.end(Failed(life.name, reason, f"{type(error).__name__}: {error}", error))


def _without_drafts(
    batch: Sequence[DraftedSequence], sequence_ids: Collection[int]
) -> list[DraftedSequence]:
    """Return the batch with nothing drafted for some sequences; the same rows for the others."""
    return [
        attrs.evolve(row, proposal=NOTHING)
        if row.proposal.tokens and row.sequence.sequence_id in sequence_ids
        else row
        for row in batch
    ]


def _check_emitted(batch: Sequence[DraftedSequence], emitted: Sequence[Sequence[int]]) -> None:
    """Refuse what is not an accepted prefix and one more token: it would corrupt a sequence."""
    if len(emitted) != len(batch):
        raise ProtocolError(f"the verifier returned {len(emitted)} rows for {len(batch)}")
    for row, tokens in zip(batch, emitted, strict=True):
        if not row.needs_scores:
            continue
        drafted, count = row.proposal.tokens, len(tokens)
        if not 1 <= count <= len(drafted) + 1:
            raise ProtocolError(f"{count} tokens emitted for {len(drafted)} drafted")
        if tokens[-1] < 0:
            raise ProtocolError(f"the emitted id {tokens[-1]} is not a token")
        if count > 1 and not is_path(row.proposal, tokens[:-1]):
            raise ProtocolError(f"emitted {list(tokens)}, which accepts none of {list(drafted)}")
