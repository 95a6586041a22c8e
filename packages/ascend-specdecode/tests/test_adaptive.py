"""Adaptive k: the right k on steady text, a bounded loss on adversarial text and costs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ascend_specdecode import (
    AdaptiveConfig,
    ArgumentError,
    DraftedSequence,
    EngineConfig,
    Mode,
    SpeculationReport,
)
from ascend_specdecode.adaptive.controller import AdaptiveK, FixedK, StepRecord
from ascend_specdecode.adaptive.models import AcceptanceModel, AffineCost, expected_tokens
from ascend_specdecode.simulator import SpeedResult, Workload, measure_speed

LARGEST = 6
Score = Callable[[Sequence[DraftedSequence]], float]


def flat(batch: Sequence[DraftedSequence]) -> float:
    """A memory-bound target: a call takes a second, whatever its size."""
    return 1.0


def computed(batch: Sequence[DraftedSequence]) -> float:
    """A compute-bound target: every token costs."""
    return 0.1 + 0.05 * sum(1 + len(row.proposal.tokens) for row in batch)


def measured(
    k: int,
    chance: Any,
    draft: float | Callable[[int, int], float],
    *,
    adaptive: AdaptiveConfig | None = None,
    score: Score = flat,
    mode: Mode = Mode.LOCKSTEP,
    requests: int = 4,
    tokens: int = 600,
    places: int = 16,
) -> SpeedResult:
    seconds = draft if callable(draft) else lambda drafted, rows: draft * drafted
    config = EngineConfig(
        mode=mode,
        num_speculative_tokens=k,
        adaptive=adaptive,
        draft_time_limit=None,
        max_num_seqs=places,
    )
    workload = Workload(requests, 4, tokens, chance, seed=3)
    return measure_speed(workload, config, score_seconds=score, draft_seconds=seconds)


@functools.cache
def plain(chance: Any, score: Score, **load: int) -> SpeedResult:
    return measured(0, chance, 0.0, score=score, **load)


def gain(chance: Any, draft: Any, mode: Mode, score: Score = flat, **load: int) -> float:
    """Speed against plain decoding of the same requests."""
    found = measured(
        LARGEST, chance, draft, adaptive=AdaptiveConfig(), mode=mode, score=score, **load
    )
    without = plain(chance, score, **load)
    assert found.tokens == without.tokens
    return without.seconds / found.seconds


# Adversaries: what a drafter gets right, by stream and position.


def never(stream: int, position: int) -> float:
    return 0.0


def bursts(stream: int, position: int) -> float:
    """Perfect for as long as it takes to trust it, then useless for longer."""
    return 1.0 if position % 150 < 40 else 0.0


def flicker(stream: int, position: int) -> float:
    return float(position % 2 == 0)


def betrayal(stream: int, position: int) -> float:
    return 1.0 if position < 100 else 0.0


def every_fourth_request(stream: int, position: int) -> float:
    """Drafts of one request pay for those of three others in the same batch."""
    return 1.0 if stream % 4 == 0 else 0.0


def first_token_only(stream: int, position: int) -> float:
    return 1.0 if (position * 2654435761 >> 8) % 3 == 0 else 0.1


ADVERSARIES = [never, bursts, flicker, betrayal, every_fourth_request, first_token_only]


class Spikes:
    """A drafter that is cheap, but every so often takes very long."""

    def __init__(self, every: int, seconds: float) -> None:
        self._calls, self._every, self._seconds = itertools.count(1), every, seconds

    def __call__(self, k: int, rows: int) -> float:
        return self._seconds if next(self._calls) % self._every == 0 else 0.02 * k


class Decay:
    """A drafter that becomes slower with every call."""

    def __init__(self) -> None:
        self._calls = itertools.count()

    def __call__(self, k: int, rows: int) -> float:
        return 0.02 * k * 1.05 ** min(next(self._calls), 150)


COSTS: dict[str, Callable[[], Any]] = {
    "0.05": lambda: 0.05,
    "0.5": lambda: 0.5,
    "2": lambda: 2.0,
    "50": lambda: 50.0,
    "spikes": lambda: Spikes(7, 30.0),
    "slower and slower": Decay,
}


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda one: str(one.__name__))
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("mode", list(Mode))
def test_never_worse_than_plain_by_more_than_5_percent(
    adversary: Any, cost: str, mode: Mode
) -> None:
    # Requests that differ need a steady load: tokens per second count, not who is last.
    load = {"requests": 64, "tokens": 60, "places": 4} if adversary is every_fourth_request else {}
    assert gain(adversary, COSTS[cost](), mode, **load) >= 0.95


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda one: str(one.__name__))
def test_nor_on_a_compute_bound_target(adversary: Any) -> None:
    assert gain(adversary, 0.02, Mode.LOCKSTEP, computed, requests=16, tokens=200) >= 0.95


def test_always_drafting_loses_far_more() -> None:
    """The bound above is not there for free: without adaptive k these traces lose a lot."""
    for adversary in (never, bursts, betrayal):
        fixed = measured(LARGEST, adversary, 0.5)
        assert plain(adversary, flat).seconds / fixed.seconds < 0.6


def test_the_loss_limit_is_what_protects() -> None:
    """The same policy with a limit that never binds loses far more than 5 %."""
    unlimited = AdaptiveConfig(loss_limit=1.0)
    for adversary, draft in ((never, 2.0), (bursts, 0.5), (betrayal, Spikes(7, 30.0))):
        found = measured(LARGEST, adversary, draft, adaptive=unlimited)
        assert plain(adversary, flat).seconds / found.seconds < 0.8


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("draft", [0.02, 0.1, 0.3])
def test_close_to_the_best_fixed_k_on_steady_text(draft: float, chance: float, mode: Mode) -> None:
    load = {"requests": 2, "tokens": 300}
    fixed = [measured(k, chance, draft, mode=mode, **load) for k in (0, 1, 2, 3, 4, LARGEST)]
    found = measured(LARGEST, chance, draft, mode=mode, adaptive=AdaptiveConfig(), **load)
    assert min(one.seconds for one in fixed) / found.seconds >= 0.9


def test_follows_a_change_of_text() -> None:
    """Text that becomes easy is noticed, although nothing was drafted for long."""

    def later_easy(stream: int, position: int) -> float:
        return 0.95 if position > 300 else 0.0

    found = measured(LARGEST, later_easy, 0.3, adaptive=AdaptiveConfig(), tokens=900)
    assert plain(later_easy, flat, tokens=900).seconds / found.seconds > 1.2
    assert found.speculation.k > 0


def test_a_request_that_drafts_badly_is_left_out_where_scoring_costs() -> None:
    """On a compute-bound target rows that accept nothing cost time; they get no drafts."""
    found = measured(
        LARGEST, every_fourth_request, 0.01, adaptive=AdaptiveConfig(), score=computed, requests=8
    )
    fixed = measured(LARGEST, every_fourth_request, 0.01, score=computed, requests=8)
    assert sum(found.statistics.drafted) < sum(fixed.statistics.drafted) / 3
    assert fixed.seconds / found.seconds > 1.3


# The report.


def known(policy: AdaptiveK | FixedK, steps: int, **changes: Any) -> SpeculationReport:
    """What a policy reports after some equal steps."""
    step: dict[str, Any] = {
        "rows": 1,
        "k": 2,
        "scored": 3,
        "emitted": 2,
        "tried": [20, 20],
        "accepted": [20, 0],
        "draft_seconds": 0.2,
        "waited_seconds": 0.2,
        "score_seconds": 1.0,
        "prompts": False,
    }
    for _ in range(steps):
        policy.observe(StepRecord(**(step | changes)))
    return policy.report(1)


def test_break_even_is_where_drafting_stops_to_pay() -> None:
    """k = 2 at 0.1 s a token: 1 + p + p^2 tokens take 1.2 s, so p + p^2 = 0.2."""
    report = known(FixedK(2), 50)
    expected = (-1 + math.sqrt(1 + 4 * 0.2)) / 2
    assert report.break_even == pytest.approx(expected, rel=1e-3)
    assert report.draft_seconds == pytest.approx(0.2)
    assert report.plain_seconds == pytest.approx(1.0)
    assert report.acceptance == pytest.approx((1.0, 0.0), abs=0.1)


def test_break_even_agrees_with_the_simulator() -> None:
    """Just above it a run gains, just below it a run loses."""
    report = measured(2, 0.5, 0.2).speculation
    assert report.break_even is not None
    for distance, sign in ((0.1, 1), (-0.1, -1)):
        chance = report.break_even + distance
        fixed = measured(2, chance, 0.2)
        assert sign * (plain(chance, flat).seconds / fixed.seconds - 1) > 0


def test_no_acceptance_breaks_even_when_drafting_is_too_slow() -> None:
    assert known(FixedK(2), 50, draft_seconds=5.0).break_even is None


def test_nothing_is_reported_before_a_measurement() -> None:
    report = AdaptiveK(4, AdaptiveConfig()).report(8)
    assert report.k == 0
    assert report.break_even is None
    assert report.tokens_per_second == ()


def test_off_switch() -> None:
    found = measured(3, never, 0.5, tokens=50)
    assert found.statistics.plain_rows == 2 * 4  # the first step and the last token of each
    assert found.speculation.k == 3
    nothing = measured(0, never, 0.5, tokens=50, adaptive=AdaptiveConfig())
    assert nothing.statistics.drafts == 0


# The models.


def test_expected_tokens_by_enumeration() -> None:
    """Sum over all outcomes of accepting or not, written apart from the formula."""
    chances = [0.9, 0.5, 0.2]
    for k in range(4):
        mean = 0.0
        for outcome in itertools.product([True, False], repeat=k):
            share = math.prod(
                chance if right else 1 - chance
                for chance, right in zip(chances, outcome, strict=False)
            )
            length = next((i for i, right in enumerate(outcome) if not right), k)
            mean += share * (length + 1)
        assert expected_tokens(chances)[k] == pytest.approx(mean)


def test_acceptance_is_learned_by_position_and_forgotten() -> None:
    model = AcceptanceModel(3, memory=60)
    for _ in range(600):
        model.observe([10, 9, 3], [9, 3, 0])
    assert model.chances() == pytest.approx([0.9, 1 / 3, 0.0], abs=0.03)
    for _ in range(600):
        model.observe([10, 0, 0], [0, 0, 0])
    assert model.chances()[0] < 0.02
    before = model.chances()
    model.observe([], [])
    assert model.chances() == before  # a step without drafts teaches nothing


def test_an_affine_cost_is_recovered_from_noise() -> None:
    cost = AffineCost(500, proportional=False)
    for step in range(400):
        size = 1 + step % 20
        cost.observe(size, 0.5 + 0.03 * size + 0.02 * math.sin(step * 12.9898))
    for size in (1, 10, 20, 40):
        assert cost.seconds(size) == pytest.approx(0.5 + 0.03 * size, rel=0.1)


@pytest.mark.parametrize(("proportional", "expected"), [(True, 0.2), (False, 0.4)])
def test_one_size_leans_on_the_prior(proportional: bool, expected: float) -> None:
    cost = AffineCost(64, proportional=proportional)
    assert not cost.known
    assert cost.seconds(3) == 0.0
    for _ in range(20):
        cost.observe(8, 0.4)
    assert cost.seconds(8) == pytest.approx(0.4)
    assert cost.seconds(4) == pytest.approx(expected)


def test_one_slow_call_does_not_spoil_the_estimate() -> None:
    cost = AffineCost(64, proportional=False)
    for _ in range(60):
        cost.observe(8, 0.4)
    cost.observe(8, 4000.0)
    assert cost.seconds(8) < 0.45


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": 1.0}, "memory: found 1.0, allowed a number in 4..1e"),
        ({"loss_limit": -0.1}, "loss_limit: found -0.1, allowed a number in 0..1"),
        ({"warm_up": 0}, "warm_up: found 0, allowed an integer >= 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        AdaptiveConfig(**settings)
