"""What a consumer of a simulated run got, and what must hold of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs

from ascend_specdecode.orchestrator.config import EngineConfig, WhenFull
from ascend_specdecode.requests import (
    Cancelled,
    CancelReason,
    Ending,
    Event,
    Failed,
    FailReason,
    Finished,
    FinishReason,
    Tokens,
)
from ascend_specdecode.simulator.models import continuation
from ascend_specdecode.simulator.scenarios import Closing, Consumer


@attrs.define(eq=False)
class Outcome:
    """What a consumer got.

    Attributes:
        consumer: who asked.
        events: what arrived.
        asked: whether the request was submitted.
        refused: why the engine did not take it.
        pending: events left in its queue when the consumer was done.
        left: whether the consumer stopped listening by itself.
        swept: whether it was cancelled together with the engine's block.
    """

    consumer: Consumer
    events: list[Event] = attrs.field(factory=list)
    asked: bool = False
    pending: int = 0
    refused: Exception | None = None
    left: bool = False
    swept: bool = False

    @property
    def name(self) -> str:
        """The request's name."""
        return str(self.consumer.request.name)

    @property
    def tokens(self) -> list[int]:
        """All tokens that arrived."""
        parts = [event.tokens for event in self.events if isinstance(event, Tokens)]
        return [token for part in parts for token in part]

    @property
    def endings(self) -> list[Ending]:
        """Every ending that arrived."""
        return [event for event in self.events if isinstance(event, Ending)]


@attrs.frozen
class Facts:
    """What the run knows about itself.

    Attributes:
        config: the engine's settings.
        closing: how the engine's block was left.
        blamed: streams for which an error or a hang was injected, by reason of failure.
        counted: endings in the engine's statistics, by (kind, reason).
    """

    config: EngineConfig
    closing: Closing
    blamed: Mapping[FailReason, Collection[int]]
    counted: Counter[tuple[str, str]]


def violations(outcomes: Sequence[Outcome], facts: Facts) -> Iterator[str]:
    """Say what does not hold."""
    for outcome in outcomes:
        for text in (*_tokens(outcome), *_ending(outcome, facts)):
            yield f"{outcome.name}: {text}"
    asked = sum(outcome.asked for outcome in outcomes)
    ended = sum(facts.counted.values())
    if asked != ended:
        yield f"{asked} requests were submitted and {ended} ended"
    seen = Counter(_key(ending) for outcome in outcomes for ending in outcome.endings)
    for key, count in seen.items():
        if count > facts.counted[key]:
            yield f"{count} consumers saw {key}, the engine counted {facts.counted[key]}"


def _key(ending: Ending) -> tuple[str, str]:
    return type(ending).__name__.lower(), ending.reason.value


def _tokens(outcome: Outcome) -> Iterator[str]:
    """No token lost, doubled or wrong."""
    request, got = outcome.consumer.request, outcome.tokens
    own = continuation([int(token) for token in request.prompt], request.max_new_tokens)
    if got != own[: len(got)]:
        yield f"got {got}, the target's own are {own}"
    stops = [index for index, token in enumerate(own) if token in request.stop_tokens]
    whole = stops[0] + 1 if stops else request.max_new_tokens
    if len(got) > whole:
        yield f"got {len(got)} tokens, complete with {whole}"
    for event in outcome.events:
        if isinstance(event, Finished):
            reason = FinishReason.STOP if stops else FinishReason.LENGTH
            if event.reason is not reason or len(got) != whole:
                yield f"finished by {event.reason} with {len(got)} of {whole} tokens ({reason})"
        elif isinstance(event, Tokens) and (not event.tokens or event.accepted > event.drafted):
            yield f"event {event}"


def _ending(outcome: Outcome, facts: Facts) -> Iterator[str]:
    """Exactly one ending, the last event, with a reason that something gave."""
    endings = outcome.endings
    if not outcome.asked:
        yield from _refusal(outcome, facts)
        return
    if len(endings) > 1 or (endings and outcome.events[-1] is not endings[0]):
        yield f"endings {endings} in {len(outcome.events)} events"
    if endings and outcome.pending:
        yield f"{outcome.pending} events follow the ending"
    if not endings and not outcome.left and not outcome.swept:
        yield "listened to the end and got no ending"
    for ending in endings:
        if isinstance(ending, Cancelled):
            yield from _cancellation(ending, facts)
        if isinstance(ending, Failed):
            yield from _failure(outcome, ending, facts)


def _cancellation(ending: Cancelled, facts: Facts) -> Iterator[str]:
    if ending.reason is CancelReason.CONSUMER:
        yield "was told that its consumer cancelled it"
    elif facts.closing is Closing.DRAIN:
        yield "was told that the engine closed, which it did not"


def _failure(outcome: Outcome, ending: Failed, facts: Facts) -> Iterator[str]:
    request = outcome.consumer.request
    if ending.reason is FailReason.REQUEST_TIME_LIMIT:
        if request.time_limit is None:
            yield "failed by a time limit that it does not have"
    elif ending.reason is FailReason.STEP_TIME_LIMIT:
        if facts.config.score_time_limit is None:
            yield "failed by a step time limit that the engine does not have"
    elif int(request.prompt[0]) not in facts.blamed.get(ending.reason, ()):
        yield f"failed for an error that was not its own: {ending}"
    if not ending.detail:
        yield f"failed without a detail: {ending}"


def _refusal(outcome: Outcome, facts: Facts) -> Iterator[str]:
    if outcome.events:
        yield f"was never submitted and got {outcome.events}"
    if outcome.refused is None and not outcome.left and not outcome.swept:
        yield "was neither submitted nor refused"
    full = type(outcome.refused).__name__ == "QueueFullError"
    if full and facts.config.when_full is WhenFull.WAIT:
        yield "was refused by an engine that is set to wait"
