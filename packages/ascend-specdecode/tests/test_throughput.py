"""Pipelined drafting against the ideal schedule, which each test computes for itself."""

from __future__ import annotations

import pytest

from ascend_specdecode import EngineConfig, Mode
from ascend_specdecode.simulator import SpeedResult, Workload, measure_speed
from ascend_specdecode.simulator.models import is_right

SCORE = 1.0  # seconds of a target call, whatever its size: memory bound
PROMPT, TOKENS, SEED = 8, 300, 5


def measured(mode: Mode, k: int, draft: float, chance: float, requests: int = 1) -> SpeedResult:
    """One engine; drafting costs ``draft`` seconds for each token of a batch."""
    return measure_speed(
        Workload(requests, PROMPT, TOKENS, chance, SEED),
        EngineConfig(mode=mode, num_speculative_tokens=k, adaptive=None, draft_time_limit=None),
        score_seconds=lambda batch: SCORE,
        draft_seconds=lambda drafted, rows: draft * drafted,
    )


def ideal_seconds(k: int, draft: float, chance: float, stream: int = 0) -> float:
    """The best one request can do, by a clairvoyant who knows which guesses hold.

    A step scores k drafted tokens while the k + 1 tokens after them are drafted: if all k and the
    bonus token are as drafted, the next step starts as soon as both are done; if that is later than
    drafting anew, or a guess fails, the next step starts after a new draft.
    """

    def right(position: int) -> bool:
        return is_right(SEED, stream, position, chance)

    done, seconds = 1, SCORE  # the prompt's step gives the first token
    seconds += draft * min(k, TOKENS - done - 1)
    while done < TOKENS:
        asked = min(k, TOKENS - done - 1)
        position = PROMPT + done
        accepted = next((i for i in range(asked) if not right(position + i)), asked)
        done += accepted + 1
        following = min(k, max(0, TOKENS - done - 1))
        anew = SCORE + draft * following
        holds = accepted == asked and right(position + accepted)
        step = min(max(SCORE, draft * (following + 1)), anew) if holds else anew
        seconds += step if done < TOKENS else SCORE
    return seconds


@pytest.mark.parametrize("chance", [1.0, 0.9, 0.7])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_one_request_reaches_the_ideal(k: int, share: float, chance: float) -> None:
    """``share``: how much of a target call drafting ahead takes."""
    draft = share * SCORE / (k + 1)
    found = measured(Mode.PIPELINED, k, draft, chance)
    assert ideal_seconds(k, draft, chance) / found.seconds >= 0.95
    assert ideal_seconds(k, draft, chance) <= found.seconds * 1.0001  # nothing beats the ideal


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("share", [0.2, 0.95])
def test_a_batch_reaches_the_ideal_when_guesses_hold(k: int, share: float) -> None:
    draft = share * SCORE / (k + 1)
    found = measured(Mode.PIPELINED, k, draft, 1.0, requests=8)
    assert ideal_seconds(k, draft, 1.0) / found.seconds >= 0.95


@pytest.mark.parametrize("chance", [0.9, 0.7])
def test_a_batch_of_mixed_guesses_reaches_the_ideal_of_cheap_drafts(chance: float) -> None:
    """The ideal is that of rows that share nothing, which no batch can beat."""
    draft = 0.01
    found = measured(Mode.PIPELINED, 4, draft, chance, requests=8)
    slowest = max(ideal_seconds(4, draft, chance, stream) for stream in range(8))
    assert slowest / found.seconds >= 0.95


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_pipelined_beats_lockstep_when_drafting_is_slow(k: int, requests: int) -> None:
    """A draft takes as long as scoring: lockstep pays for both, pipelined for one."""
    draft = SCORE / (k + 1)
    pipelined = measured(Mode.PIPELINED, k, draft, 1.0, requests)
    lockstep = measured(Mode.LOCKSTEP, k, draft, 1.0, requests)
    assert pipelined.tokens == lockstep.tokens == requests * TOKENS
    expected = (SCORE + draft * k) / SCORE
    assert lockstep.seconds / pipelined.seconds >= 0.95 * expected > 1.4
    # The comparison can fail: lockstep does not reach the ideal.
    assert ideal_seconds(k, draft, 1.0) / lockstep.seconds < 0.95


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("draft", [0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_pipelined_is_not_slower_than_lockstep(k: int, draft: float, chance: float) -> None:
    """Where guesses fail often, drafting ahead must not delay what is drafted anew."""
    pipelined = measured(Mode.PIPELINED, k, draft, chance, 4)
    lockstep = measured(Mode.LOCKSTEP, k, draft, chance, 4)
    assert pipelined.tokens == lockstep.tokens
    assert lockstep.seconds / pipelined.seconds >= 0.97


def test_drafts_made_ahead_are_used_and_discarded() -> None:
    certain = measured(Mode.PIPELINED, 3, 0.1, 1.0).statistics
    assert certain.ahead_used > 70
    assert certain.ahead_discarded <= 1
    doubtful = measured(Mode.PIPELINED, 3, 0.1, 0.5).statistics
    assert 0 < doubtful.ahead_used < doubtful.ahead_discarded
    assert measured(Mode.LOCKSTEP, 3, 0.1, 1.0).statistics.ahead_used == 0
