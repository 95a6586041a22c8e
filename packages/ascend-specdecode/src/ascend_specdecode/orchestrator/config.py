"""The settings of an engine, checked once."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

import attrs

from ascend_specdecode.adaptive.config import AdaptiveConfig
from ascend_specdecode.arguments import check_integer, check_number
from ascend_specdecode.errors import ArgumentError

_ALL_SECONDS: Final = 1e9

Choice = TypeVar("Choice", bound=enum.StrEnum)


class Mode(enum.StrEnum):
    """How drafting and verifying follow each other."""

    LOCKSTEP = "lockstep"  # draft, then verify
    PIPELINED = "pipelined"  # draft the next tokens while the target verifies the last ones


class WhenFull(enum.StrEnum):
    """What happens to a request that finds ``max_waiting`` requests waiting."""

    WAIT = "wait"  # its caller waits, in order of arrival
    REFUSE = "refuse"  # its caller gets QueueFullError


def _choice(name: str, value: str, kind: type[Choice]) -> Choice:
    if value not in list(kind):
        raise ArgumentError(name, repr(value), " or ".join(repr(str(one)) for one in kind))
    return kind(value)


def _mode(value: str) -> Mode:
    return _choice("mode", value, Mode)


def _when_full(value: str) -> WhenFull:
    return _choice("when_full", value, WhenFull)


def _integer(least: int) -> Callable[[Any, Any, Any], None]:
    def check(_: object, attribute: attrs.Attribute[int], value: object) -> None:
        check_integer(attribute.name, value, least)

    return check


def _optional_seconds(_: object, attribute: attrs.Attribute[float], value: object) -> None:
    if value is not None:
        allowed = "seconds > 0, or None for no limit"
        check_number(attribute.name, value, allowed, least=math.ulp(0.0), most=_ALL_SECONDS)


@attrs.frozen(kw_only=True)
class EngineConfig:
    """Settings of :class:`DraftVerify`. Names that vLLM has are vLLM's.

    Attributes:
        mode: lockstep, or pipelined: draft ahead while the target verifies.
        num_speculative_tokens: the largest k; 0 is plain decoding.
        adaptive: settings of adaptive k; None always drafts ``num_speculative_tokens``.
        max_num_seqs: most requests that hold target state at the same time.
        max_num_batched_tokens: most positions that one target call computes; at least
            ``max_num_seqs``, so that every running request gets a token in every step.
        max_cached_tokens: most positions of target state over all requests; None for no limit.
            When it runs out, the request that would be served last gives its state back and is
            computed again later; it keeps its tokens.
        prefill_chunk: most prompt tokens of one request in one step, so that a long prompt stalls
            nobody.
        max_waiting: most requests that wait for a place.
        when_full: what the next one meets: its caller waits, or is refused.
        max_queued_events: events that may wait for a slow consumer; then its request pauses.
        draft_time_limit: seconds for one ``propose``; None for no limit.
        score_time_limit: seconds for one ``score``; None for no limit.
        draft_failure_limit: after so many failed or late drafts a request is decoded plainly.
        aging: seconds of waiting that are worth one level of priority; None: priority is strict.
        drain_time_limit: seconds that leaving the engine waits for the requests under way, of
            which a consumer may have lost interest; None: as long as they take.
        trace_capacity: spans kept for the trace, the newest; 0 keeps none.
        seed: of the generator that gives a seed to requests without one; None draws from the
            operating system.

    Raises:
        ArgumentError: a setting is out of range.
    """

    mode: Mode = attrs.field(default=Mode.LOCKSTEP, converter=_mode)
    num_speculative_tokens: int = attrs.field(default=4, validator=_integer(0))
    adaptive: AdaptiveConfig | None = attrs.field(factory=AdaptiveConfig)
    max_num_seqs: int = attrs.field(default=256, validator=_integer(1))
    max_num_batched_tokens: int = attrs.field(default=8192, validator=_integer(1))
    max_cached_tokens: int | None = None
    prefill_chunk: int = attrs.field(default=2048, validator=_integer(1))
    max_waiting: int = attrs.field(default=1024, validator=_integer(1))
    when_full: WhenFull = attrs.field(default=WhenFull.WAIT, converter=_when_full)
    max_queued_events: int = attrs.field(default=64, validator=_integer(1))
    draft_time_limit: float | None = attrs.field(default=10.0, validator=_optional_seconds)
    score_time_limit: float | None = attrs.field(default=None, validator=_optional_seconds)
    draft_failure_limit: int = attrs.field(default=3, validator=_integer(1))
    aging: float | None = attrs.field(default=10.0, validator=_optional_seconds)
    drain_time_limit: float | None = attrs.field(default=30.0, validator=_optional_seconds)
    trace_capacity: int = attrs.field(default=0, validator=_integer(0))
    seed: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ArgumentError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs ({self.max_num_seqs})",
            )
        if self.max_cached_tokens is not None:
            check_integer("max_cached_tokens", self.max_cached_tokens, least=2)
        if self.seed is not None:
            check_integer("seed", self.seed, least=0)
