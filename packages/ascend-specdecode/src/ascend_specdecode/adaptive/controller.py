"""How many tokens to draft next: the k with the most expected tokens per second.

For every k up to the limit: expected tokens E(k) from the measured acceptance of each position,
time T(k) from the measured cost of drafting and scoring; the largest E(k) / T(k) wins, k = 0
included. Two things keep it honest where the estimates are wrong:

- A ledger. Every step with drafts is compared with plain steps that would have emitted as many
  tokens; what it took longer is a debt. When the debt is above ``loss_limit`` of the time observed
  (and a few plain steps, for a start), nothing is drafted until enough plain time has passed. So
  no drafter and no text can cost more than that share, whatever the estimates say.
- Probes. Where k = 0 wins, a short draft is tried as often as half of that share can pay for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

import attrs

from ascend_specdecode.adaptive.config import AdaptiveConfig
from ascend_specdecode.adaptive.models import AcceptanceModel, StepCosts, expected_tokens

_START_ALLOWANCE: Final = 4.0  # plain steps that may be lost before the share counts
_SHORTEST_LIMIT: Final = 2.0  # a draft is not late before so many times its usual cost
_BISECTIONS: Final = 40
_STEPS_WITHOUT_PLAIN: Final = 200  # then one plain step measures its cost anew


@attrs.frozen
class StepRecord:
    """What a step measured.

    Attributes:
        rows: decoding requests that took part, whether they were verified or only drafted for.
        k: drafted tokens that were asked for, 0 for a plain step.
        scored: positions that the target computed for those that were verified.
        emitted: tokens they emitted.
        tried: drafts that reached each position.
        accepted: how many of them were accepted there.
        draft_seconds: time that ``propose`` took, None where it was not called.
        waited_seconds: time during which neither ``score`` nor ``verify`` ran.
        score_seconds: time that ``score`` and ``verify`` took.
        prompts: whether the target also computed parts of prompts.
    """

    rows: int
    k: int
    scored: int
    emitted: int
    tried: Sequence[int]
    accepted: Sequence[int]
    draft_seconds: float | None
    waited_seconds: float
    score_seconds: float
    prompts: bool


@attrs.frozen
class SpeculationReport:
    """What the engine knows about the worth of drafting.

    Attributes:
        k: what it would draft next.
        acceptance: chance of each position, given those before it.
        tokens_per_second: expected of one request, for k = 0, 1, ...; empty before measurements.
        break_even: the acceptance, the same at every position, from which drafting ``k`` tokens
            (one where ``k`` is 0) is as fast as plain decoding; None where no acceptance is
            enough, nothing was measured, or trees are drafted.
        draft_seconds: cost of drafting that many tokens.
        plain_seconds: cost of a plain step.
    """

    k: int
    acceptance: tuple[float, ...]
    tokens_per_second: tuple[float, ...]
    break_even: float | None
    draft_seconds: float
    plain_seconds: float


class SpeculationPolicy(Protocol):
    """Chooses k; see :class:`AdaptiveK` and :class:`FixedK`."""

    costs: StepCosts

    def choose(self, rows: int) -> int:
        """Return k for a step of ``rows`` decoding requests."""
        ...

    def draft_limit(self, k: int, rows: int) -> float | None:
        """Return the seconds after which a draft is not worth waiting for, None for no limit."""
        ...

    def row_limit(self, rate: float) -> int:
        """Return the most tokens worth drafting for a request with this rate of acceptance."""
        ...

    def guess_holds(self, k: int, *, accepted: bool) -> float:
        """Return the chance that a draft made ahead can be used.

        Args:
            k: drafted tokens that the target verifies meanwhile.
            accepted: whether all of them are known to be accepted.
        """
        ...

    def waits(self, k: int, rows: int) -> bool:
        """Return whether rows that have drafts had better wait for those that have none."""
        ...

    def observe(self, step: StepRecord) -> None:
        """Learn from a step."""
        ...

    def report(self, rows: int) -> SpeculationReport:
        """Say what is known."""
        ...


class _Measured:
    """What both policies measure and report."""

    def __init__(
        self, largest: int, config: AdaptiveConfig, *, pipelined: bool, trees: bool
    ) -> None:
        self.largest = largest
        self.costs = StepCosts(config.memory)
        self._config = config
        self._pipelined = pipelined
        self._trees = trees
        self._depth = 0  # of the trees so far
        self._acceptance = AcceptanceModel(largest, config.memory)

    def guess_holds(self, k: int, *, accepted: bool) -> float:
        """Return the chance of the bonus token, and of the k tokens before it."""
        chances = self._chances()[: self._path(k)]
        bonus = chances[-1] if chances else 0.0
        return bonus if accepted else math.prod(chances) * bonus

    def waits(self, k: int, rows: int) -> bool:
        """Whether rows that have drafts had better wait for those that have none."""
        waiting, going = self._pipelined_seconds(k, rows, self._chances())
        return waiting <= going

    def _chances(self) -> list[float]:
        """Return the chance of each position; beyond the end of the trees there is none."""
        chances = self._acceptance.chances()
        depth = self._path(self.largest)
        return chances[:depth] + [0.0] * (self.largest - depth)

    def _path(self, k: int) -> int:
        """Return the tokens of one path of a draft of ``k`` tokens."""
        return min(k, self._depth or k) if self._trees else k

    def _learn(self, step: StepRecord) -> None:
        reached = [place + 1 for place, drafts in enumerate(step.tried) if drafts]
        self._depth = max([self._depth, *reached])
        if step.draft_seconds is not None:
            self.costs.draft.observe(step.k, step.draft_seconds)
        if step.scored and not step.prompts:
            self.costs.score.observe(step.scored, step.score_seconds)
        self._acceptance.observe(step.tried, step.accepted)

    def _plain(self, rows: int) -> float:
        return self.costs.score.seconds(rows)

    def _step_seconds(self, k: int, rows: int, chances: Sequence[float]) -> float:
        """Expected time of a step with drafts of k tokens."""
        score = self.costs.score.seconds(rows * (k + 1))
        if not k:
            return score
        draft = self.costs.draft.seconds(k)
        if not self._pipelined:
            return draft + score
        return min(self._pipelined_seconds(k, rows, chances))

    def _pipelined_seconds(
        self, k: int, rows: int, chances: Sequence[float]
    ) -> tuple[float, float]:
        """Expected time between two scorings of a row: if rows wait for each other, if not.

        A guess holds when all k tokens and the bonus token are what was drafted. Either all rows
        wait for the drafts of those whose guess failed, or these miss every second step.
        """
        score, draft = self.costs.score.seconds(rows * (k + 1)), self.costs.draft.seconds(k)
        beside = max(score, self.costs.draft.seconds(k + 1))
        path = self._path(k)
        held = math.prod(chances[:path]) * chances[path - 1]
        all_hold = held**rows
        return all_hold * beside + (1.0 - all_hold) * (score + draft), (2.0 - held) * beside

    def _rates(self, rows: int, chances: Sequence[float]) -> list[float]:
        """Expected tokens per second of one request for k = 0..largest."""
        tokens = expected_tokens(chances)
        times = [self._step_seconds(k, rows, chances) for k in range(self.largest + 1)]
        return [count / max(time, 1e-12) for count, time in zip(tokens, times, strict=True)]

    def _break_even(self, k: int, rows: int) -> float | None:
        plain = self._plain(rows)
        if not k or self._trees or not self.costs.draft.known or plain <= 0.0:
            return None

        def gain(chance: float) -> float:
            chances = [chance] * k
            return expected_tokens(chances)[k] * plain - self._step_seconds(k, rows, chances)

        low, high = 0.0, 1.0
        if gain(high) < 0.0:
            return None
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            low, high = (low, middle) if gain(middle) >= 0.0 else (middle, high)
        return high

    def _describe(self, k: int, rows: int) -> SpeculationReport:
        chances = self._chances()
        measured = self.costs.score.known
        shown = max(k, min(1, self.largest))
        return SpeculationReport(
            k=k,
            acceptance=tuple(chances),
            tokens_per_second=tuple(self._rates(rows, chances)) if measured else (),
            break_even=self._break_even(shown, rows),
            draft_seconds=self.costs.draft.seconds(shown),
            plain_seconds=self._plain(rows),
        )


class FixedK(_Measured):
    """Always the same k. Measures as the adaptive policy does, so that it can report."""

    def __init__(self, k: int, *, pipelined: bool = False, trees: bool = False) -> None:
        super().__init__(k, AdaptiveConfig(), pipelined=pipelined, trees=trees)

    def choose(self, rows: int) -> int:
        """Return k."""
        return self.largest

    def draft_limit(self, k: int, rows: int) -> float | None:
        """No limit of its own."""
        return None

    def row_limit(self, rate: float) -> int:
        """Return k, whatever the rate."""
        return self.largest

    def observe(self, step: StepRecord) -> None:
        """Measure, for the report."""
        self._learn(step)

    def report(self, rows: int) -> SpeculationReport:
        """Say what was measured."""
        return self._describe(self.largest, max(1, rows))


class AdaptiveK(_Measured):
    """The k with the most expected tokens per second, within a bounded loss.

    Args:
        largest: the largest k.
        config: its settings.
        pipelined: whether the engine drafts ahead, which hides the cost of drafts that hold.
        trees: whether drafts are trees. Part of a tree tells nothing about a smaller one, so they
            are drafted whole or not at all.
    """

    def __init__(
        self, largest: int, config: AdaptiveConfig, *, pipelined: bool = False, trees: bool = False
    ) -> None:
        super().__init__(largest, config, pipelined=pipelined, trees=trees)
        self._plain_steps = 0
        self._since_plain = 0
        self._elapsed = 0.0
        self._debt = 0.0
        self._marginal = 0.0

    def choose(self, rows: int) -> int:
        """Return k for the next step."""
        k, self._marginal = self._best(max(1, rows))
        return self._drafted(k)

    def draft_limit(self, k: int, rows: int) -> float | None:
        """Return what may still be lost; a draft that takes longer is given up."""
        usual = self.costs.draft.seconds(k)
        left = self._budget(max(1, rows)) - self._debt
        return max(_SHORTEST_LIMIT * usual, left, 1e-6)

    def row_limit(self, rate: float) -> int:
        """Return how many positions earn more tokens than their scoring costs."""
        if self._marginal <= 0.0:
            return self.largest
        if rate <= self._marginal:
            return 0
        if rate >= 1.0 or self._trees:
            return self.largest
        return min(self.largest, int(math.log(self._marginal) / math.log(rate)))

    def observe(self, step: StepRecord) -> None:
        """Learn from a step and enter it in the ledger."""
        self._learn(step)
        if not step.rows or not step.emitted:
            return
        drafted = step.draft_seconds is not None or step.scored > step.emitted
        self._plain_steps += not drafted and not step.prompts
        self._since_plain = self._since_plain + 1 if drafted else 0
        plain = self._plain(step.rows)
        gained = plain * step.emitted / step.rows
        self._elapsed += gained
        if drafted:
            # Gains pay debts off but are no credit: a good hour must not pay for a bad one.
            self._debt = max(0.0, self._debt + self._cost(step, plain) - gained)

    def report(self, rows: int) -> SpeculationReport:
        """Say what is known, and what would be drafted next."""
        rows = max(1, rows)
        return self._describe(self._drafted(self._best(rows)[0]), rows)

    def _drafted(self, k: int) -> int:
        return self.largest if k and self._trees else k

    def _best(self, rows: int) -> tuple[int, float]:
        """Return k, and the tokens that a scored position must add to be worth its time."""
        if not self.largest or self._plain_steps < self._config.warm_up:
            return 0, 0.0
        if not self.costs.draft.known:
            return 1, 0.0
        chances = self._chances()
        rates = self._rates(rows, chances)
        best = max(range(len(rates)), key=rates.__getitem__)
        if not best:
            return self._probe(rows, chances), 0.0
        lost = self._debt > self._budget(rows) or self._since_plain >= _STEPS_WITHOUT_PLAIN
        return 0 if lost else best, rows * rates[best] * self.costs.score.slope

    def _cost(self, step: StepRecord, plain: float) -> float:
        """Return the seconds of a step; without those of prompts, which plain steps have too."""
        if not step.prompts:
            return step.waited_seconds + step.score_seconds
        extra = self.costs.score.slope * max(0, step.scored - step.rows)
        return step.waited_seconds + plain + extra

    def _budget(self, rows: int) -> float:
        return _START_ALLOWANCE * self._plain(rows) + self._config.loss_limit * self._elapsed

    def _probe(self, rows: int, chances: Sequence[float]) -> int:
        """Return a short draft where half of the loss limit has room for it, else 0."""
        tokens = expected_tokens(chances[:1])[1]
        loss = max(0.0, self._step_seconds(1, rows, chances) - tokens * self._plain(rows))
        affordable = self._config.loss_limit * self._elapsed / 2.0
        return 1 if self._debt + loss <= affordable else 0
