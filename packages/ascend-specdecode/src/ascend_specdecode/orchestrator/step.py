"""One step of a batch: draft, score, verify, commit; in pipelined mode drafting ahead meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import anyio
import attrs

from ascend_specdecode.adaptive.controller import SpeculationPolicy, StepRecord
from ascend_specdecode.drafted_paths import after, first_path, kept, nodes_by_depth
from ascend_specdecode.observability.statistics import Statistics
from ascend_specdecode.observability.trace import Lane
from ascend_specdecode.orchestrator.calls import DraftCall, TargetCall, Verified
from ascend_specdecode.orchestrator.lifetime import Lifetime
from ascend_specdecode.orchestrator.scheduler import Row
from ascend_specdecode.protocols import NOTHING, DraftedSequence, Proposal, ScoresT
from ascend_specdecode.sequences import SequenceState

_RATE_WEIGHT = 0.15  # weight of the newest draft in a request's own rate of acceptance
_RATE_RECOVERY = 0.01  # how fast a request without drafts is given another chance


@attrs.define(eq=False)
class _Measured:
    """What one step adds up for the policy.

    Attributes:
        rows: decoding rows, those included that were only drafted for.
        kinds: verified rows by (k asked for, drafted tokens by position, accepted tokens).
        again: accepted tokens whose state was not kept, which were computed again.
        prompts: whether parts of prompts were computed.
        drafted_k: k of the draft that was measured.
        draft_seconds: what it took, None where nothing was drafted.
    """

    rows: int = 0
    kinds: dict[tuple[int, tuple[int, ...], int], int] = attrs.field(factory=dict)
    again: int = 0
    prompts: bool = False
    drafted_k: int = 0
    draft_seconds: float | None = None

    def record(self, seconds: float, score_seconds: float) -> StepRecord:
        """Return the sums; a drafter that proposed less than asked missed there."""
        width = max((asked for asked, _, _ in self.kinds), default=0)
        tried, hits = [0] * width, [0] * width
        for (asked, _, accepted), rows in self.kinds.items():
            for position in range(min(accepted + 1, asked)):
                tried[position] += rows
            for position in range(accepted):
                hits[position] += rows
        return StepRecord(
            rows=self.rows,
            k=self.drafted_k,
            scored=self.again
            + sum((sum(drafted) + 1) * rows for (_, drafted, _), rows in self.kinds.items()),
            emitted=sum((accepted + 1) * rows for (_, _, accepted), rows in self.kinds.items()),
            tried=tried,
            accepted=hits,
            draft_seconds=self.draft_seconds,
            waited_seconds=max(0.0, seconds - score_seconds),
            score_seconds=score_seconds,
            prompts=self.prompts,
        )


class Stepper(Generic[ScoresT]):
    """Runs steps; whatever goes wrong in one is settled in it, for the requests concerned."""

    def __init__(
        self,
        drafts: DraftCall | None,
        target: TargetCall[ScoresT],
        policy: SpeculationPolicy,
        statistics: Statistics,
        *,
        pipelined: bool,
    ) -> None:
        self._drafts = drafts
        self._target = target
        self._policy = policy
        self._statistics = statistics
        self._pipelined = pipelined and drafts is not None
        self._measured = _Measured()

    async def run(self, rows: Sequence[Row]) -> None:
        """Run one step of the rows."""
        start = anyio.current_time()
        self._measured = _Measured(sum(row.whole for row in rows))
        for row in rows:
            row.k = min(row.k, self._policy.row_limit(row.life.rate))
        if self._pipelined:
            await self._run_pipelined(rows)
        else:
            await self._draft(_without_draft(rows))
            await self._observe(await self._verify(rows))
        self._report(anyio.current_time() - start)

    async def _draft(self, rows: Sequence[Row]) -> None:
        """Draft for rows while the target waits."""
        if self._drafts is None or not rows:
            return
        lives = [row.life for row in rows]
        k = _longest(rows)
        limit = self._policy.draft_limit(k, len(rows))
        states = [life.state() for life in lives]
        proposals = await self._drafts.propose(lives, states, k, limit)
        for row, proposal in zip(rows, proposals, strict=True):
            _keep(row, proposal, k)
        self._measured.drafted_k = k
        self._measured.draft_seconds = self._drafts.seconds

    async def _run_pipelined(self, rows: Sequence[Row]) -> None:
        fresh = _without_draft(rows)
        ready = [row for row in rows if not _lacks_draft(row)]
        if fresh and self._waits(len(ready), len(fresh), fresh[0].k):
            await self._draft(fresh)
            ready, fresh = list(rows), []
        ahead = [row for row in ready if row.k and row.life.remaining > row.k + 1]
        if ahead and not self._pays(fresh, len(ahead), _longest(ahead), 0.0):
            ahead = []
        beside = _Beside(fresh, ahead)
        if not beside.rows:
            await self._observe(await self._verify(ready))
            return
        start = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(self._draft_beside, beside)
            verified = await self._verify(ready)
            held = sum(row.bonus is not None for row in ahead)
            spent = anyio.current_time() - start
            kept = held and self._pays((), len(ahead), _longest(ahead), spent, held)
            if not fresh and not kept:
                group.cancel_scope.cancel()  # drafting anew is sooner than waiting for this
        self._settle(beside)
        await self._observe(verified)

    def _waits(self, ready: int, fresh: int, k: int) -> bool:
        """Whether rows that have drafts wait for those that have none, instead of going first.

        Not for long where few others gain by it: waiting costs each ready row one draft, going
        first costs each of the others one step.
        """
        costs = self._policy.costs
        if not ready or not costs.score.known or not costs.draft.known:
            return True
        draft, score = costs.draft.seconds(k), costs.score.seconds(ready * (k + 1))
        return ready * draft < fresh * max(score, draft) and self._policy.waits(k, ready + fresh)

    def _pays(
        self, fresh: Sequence[Row], rows: int, k: int, spent: float, held: int | None = None
    ) -> bool:
        """Whether drafting ahead saves more time than it costs.

        Where the guess comes true a row saves a draft; the others wait until the call is over,
        which is later than the target's by ``late`` seconds. Before scoring, the chance is that
        all drafts and the guess hold; afterwards, for the ``held`` rows, that of the guess alone.
        """
        costs = self._policy.costs
        if fresh or not costs.draft.known or not costs.score.known:
            return True
        draft, call = costs.draft.seconds(k), costs.draft.seconds(k + 1)
        if held is None:
            late = call - costs.score.seconds(rows * (k + 1))
            hits = rows * self._policy.guess_holds(k, accepted=False)
        else:
            late = call - spent
            hits = held * self._policy.guess_holds(k, accepted=True)
        return late <= 0.0 or hits * (draft - late) >= (rows - hits) * late

    async def _draft_beside(self, beside: _Beside) -> None:
        """Draft while the target scores: what comes after the drafts, and drafts that are due."""
        assert self._drafts is not None  # noqa: S101 - pipelined needs a drafter
        k = beside.k
        ahead = bool(beside.ahead)
        lives = [row.life for row in beside.rows]
        states = [life.state() for life in lives[: len(beside.fresh)]]
        states += [row.life.state().assume(_first_tokens(_proposal(row))) for row in beside.ahead]
        limit = self._policy.draft_limit(k + ahead, len(lives))
        if limit is not None:
            limit += self._policy.costs.score.seconds(len(lives) * (k + 1))
        lane = Lane.AHEAD if ahead else Lane.DRAFT
        beside.proposals = await self._drafts.propose(lives, states, k + ahead, limit, lane)
        self._measured.drafted_k = k + ahead
        self._measured.draft_seconds = self._drafts.seconds

    def _settle(self, beside: _Beside) -> None:
        """Keep the drafts made ahead whose guess of the bonus token came true."""
        found = beside.proposals or [NOTHING] * len(beside.rows)
        due = len(beside.fresh)
        for row, proposal in zip(beside.fresh, found[:due], strict=True):
            _keep(row, proposal, beside.k + bool(beside.ahead))
        for row, proposal in zip(beside.ahead, found[due:], strict=True):
            rest = NOTHING if row.bonus is None else after(proposal, row.bonus)
            held = bool(rest.tokens)
            if held:
                _keep(row, rest, beside.k)
            self._statistics.ahead_used += held
            self._statistics.ahead_discarded += bool(proposal.tokens) and not held

    async def _verify(self, rows: Sequence[Row]) -> Verified[ScoresT] | None:
        """Score and verify the rows that still live, and commit what they emit."""
        rows = [row for row in rows if row.life.ending is None]
        if not rows:
            return None
        lives = [row.life for row in rows]
        batch = [
            DraftedSequence(_sequence(row), _proposal(row), row.life.cached, row.whole)
            for row in rows
        ]
        scores = await self._target.score(lives, batch)
        if scores is None:
            return None
        emitted = await self._target.verify(lives, batch, scores, self._drafts)
        if emitted is None:
            return None
        now = anyio.current_time()
        for row, drafted, tokens in zip(rows, batch, emitted, strict=True):
            self._commit(row, drafted.proposal, tokens, now)
        return Verified(lives, batch, scores, emitted)

    async def _observe(self, verified: Verified[ScoresT] | None) -> None:
        """Let the drafter learn, once it drafts no more."""
        if verified is not None and self._drafts is not None:
            await self._target.observe(verified, self._drafts)

    def _commit(self, row: Row, proposal: Proposal, tokens: Sequence[int], now: float) -> None:
        life = row.life
        self._measured.prompts |= row.end - life.cached > 1 + life.unkept
        if not row.whole:
            life.cached, life.unkept = row.end, 0
            return
        drafted, accepted = len(proposal.tokens), len(tokens) - 1
        tree = proposal.parents is not None
        stays = kept(proposal, tokens) if tree else accepted
        by_depth = nodes_by_depth(proposal)
        self._measured.again += life.unkept
        # A chain that is shorter than was asked for missed there; a tree has the depth it has.
        asked = len(by_depth) if tree else min(row.k, life.asked)
        kind = (asked, by_depth, accepted)
        kinds = self._measured.kinds
        kinds[kind] = kinds.get(kind, 0) + 1
        if life.ending is not None:
            return
        life.proposal = None
        life.cached, life.unkept = row.end + stays, accepted - stays
        _learn_rate(life, len(by_depth), accepted)
        self._emit(life, tokens, drafted, now)
        if life.ending is not None:
            return
        if stays < drafted:
            self._target.roll_back(life, life.cached)
        if stays == accepted == (first_path(proposal) if tree else drafted):
            row.bonus = tokens[-1]

    def _emit(self, life: Lifetime, tokens: Sequence[int], drafted: int, now: float) -> None:
        first = not life.generated
        count = life.emit(tokens, drafted)
        self._statistics.generation_tokens += count
        if first:
            self._statistics.first_token.observe(now - life.submitted)
        else:
            self._statistics.inter_token.observe((now - life.last_event) / count)
        life.last_event = now

    def _report(self, seconds: float) -> None:
        for (_, drafted, accepted), rows in self._measured.kinds.items():
            self._statistics.verified(rows, drafted, accepted)
        self._policy.observe(self._measured.record(seconds, self._target.seconds))


@attrs.define(eq=False)
class _Beside:
    """What is drafted while the target scores: rows that have no drafts, then drafts ahead."""

    fresh: Sequence[Row]
    ahead: Sequence[Row]
    proposals: list[Proposal] | None = None

    @property
    def rows(self) -> list[Row]:
        return [*self.fresh, *self.ahead]

    @property
    def k(self) -> int:
        return _longest(self.rows)


def _longest(rows: Sequence[Row]) -> int:
    return max(row.k for row in rows)


def _without_draft(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if _lacks_draft(row)]


def _lacks_draft(row: Row) -> bool:
    return row.k > 0 and row.life.proposal is None


def _keep(row: Row, proposal: Proposal, k: int) -> None:
    """Keep a draft that was asked to have ``k`` tokens, to verify it in this step or the next."""
    row.life.proposal = proposal
    row.life.asked = k


def _sequence(row: Row) -> SequenceState:
    state = row.life.state()
    return state if row.whole else state.at(row.end)


def _proposal(row: Row) -> Proposal:
    """Return what the row verifies: never more than its share of the step."""
    proposal = row.life.proposal
    return proposal.first(row.k) if row.whole and proposal is not None else NOTHING


def _first_tokens(proposal: Proposal) -> tuple[int, ...]:
    return proposal.tokens[: first_path(proposal)]


def _learn_rate(life: Lifetime, drafted: int, accepted: int) -> None:
    if drafted:
        tried = accepted + (accepted < drafted)
        life.rate += _RATE_WEIGHT * (accepted / tried - life.rate)
    else:
        life.rate += _RATE_RECOVERY * (1.0 - life.rate)
