"""What one simulated run does, drawn from its seed: settings, requests, consumers, faults."""

from __future__ import annotations

import enum
import random
from typing import Final

import attrs

from ascend_specdecode.adaptive.config import AdaptiveConfig
from ascend_specdecode.orchestrator.config import EngineConfig, Mode, WhenFull
from ascend_specdecode.requests import Request
from ascend_specdecode.simulator.faults import FaultRates
from ascend_specdecode.simulator.models import VOCABULARY, continuation

_LIMITS: Final = (0.7, 3.0, 9.0)  # virtual seconds; a call takes about one


class Interest(enum.StrEnum):
    """How a consumer behaves."""

    COMPLETE = "complete"  # takes everything
    SLOW = "slow"  # waits between events, so that the engine must hold back
    BREAK = "break"  # leaves the loop after some events and drops the generation
    RAISE = "raise"  # raises inside `async with` after some events
    CANCEL = "cancel"  # its task is cancelled at a random time


class Closing(enum.StrEnum):
    """How the engine's block is left."""

    DRAIN = "drain"  # normally, after all consumers
    EARLY = "early"  # normally, while consumers outside still listen
    ERROR = "error"  # with an exception, at a random time
    CANCEL = "cancel"  # by cancellation, at a random time


@attrs.frozen
class Consumer:
    """One request and who asks for it.

    Attributes:
        request: the request; its prompt begins with the number of its stream.
        start: virtual time at which it is made.
        interest: how the consumer behaves.
        patience: events, or seconds, after which the consumer loses interest.
    """

    request: Request
    start: float
    interest: Interest
    patience: float


@attrs.frozen
class Scenario:
    """Everything a run is made from."""

    seed: int
    config: EngineConfig
    consumers: tuple[Consumer, ...]
    closing: Closing
    closing_time: float
    rates: FaultRates
    branches: int
    chance: float
    draft_seconds: float
    score_seconds: float


def scenario(seed: int) -> Scenario:
    """Draw the scenario of a seed; small, so that thousands can run."""
    draw = random.Random(seed)  # noqa: S311 - repeatable on purpose
    faulty = draw.random() < 0.8
    config = _config(draw)
    return Scenario(
        seed=seed,
        config=config,
        consumers=tuple(_consumer(draw, number, config) for number in range(draw.randint(1, 4))),
        closing=draw.choices(list(Closing), (12, 3, 1, 1))[0],
        closing_time=draw.uniform(0.0, 12.0),
        rates=_rates(draw) if faulty else FaultRates(),
        branches=draw.choice((1, 1, 2, 3)),
        chance=draw.choice((0.0, 0.3, 0.7, 0.9, 1.0)),
        draft_seconds=draw.choice((0.0, 0.1, 1.0, 3.0)),
        score_seconds=draw.choice((0.0, 1.0)),
    )


def _config(draw: random.Random) -> EngineConfig:
    sequences = draw.randint(1, 4)
    return EngineConfig(
        mode=draw.choice(list(Mode)),
        num_speculative_tokens=draw.choice((0, 1, 2, 4)),
        adaptive=draw.choice((None, None, AdaptiveConfig(memory=8.0, warm_up=1))),
        max_num_seqs=sequences,
        max_num_batched_tokens=draw.randint(sequences, 16),
        max_cached_tokens=draw.choice((None, 20, 30)),
        prefill_chunk=draw.choice((1, 3, 2048)),
        max_waiting=draw.randint(1, 3),
        when_full=draw.choice(list(WhenFull)),
        max_queued_events=draw.choice((1, 2, 64)),
        draft_time_limit=draw.choice((None, *_LIMITS)),
        score_time_limit=draw.choice((None,) * 7 + _LIMITS),
        draft_failure_limit=draw.randint(1, 3),
        aging=draw.choice((None, 1.0, 10.0)),
        drain_time_limit=draw.choice((3.0, 50.0)),
        trace_capacity=draw.choice((0, 4)),
        seed=draw.getrandbits(32),
    )


def _consumer(draw: random.Random, number: int, config: EngineConfig) -> Consumer:
    length = draw.randint(1, 9)
    prompt = [number, *(draw.randrange(VOCABULARY) for _ in range(length - 1))]
    wanted = draw.randint(1, 10)
    own = continuation(prompt, wanted)
    stops = [draw.choice(own)] if draw.random() < 0.25 else []
    request = Request(
        prompt=prompt,
        max_new_tokens=wanted,
        stop_tokens=stops,
        priority=draw.randint(-1, 1),
        time_limit=draw.choice((None,) * 7 + _LIMITS),
        name=f"request-{number}",
    )
    weights = (6, 2, 1, 1, 2)
    return Consumer(
        request=request,
        start=draw.choice((0.0, 0.0, draw.uniform(0.0, 5.0))),
        interest=draw.choices(list(Interest), weights)[0],
        patience=draw.uniform(0.0, 6.0),
    )


def _rates(draw: random.Random) -> FaultRates:
    return FaultRates(
        delay=draw.choice((0.0, 0.2)),
        reorder=draw.choice((0.0, 0.3)),
        error=draw.choice((0.0, 0.02, 0.1)),
        hang=draw.choice((0.0, 0.01)),
    )
