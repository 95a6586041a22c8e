"""What is asked of an engine, and the events it answers with."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from ascend_specdecode.arguments import check_integer, check_number
from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.parameters import GREEDY, SamplingParameters

_ALL_SECONDS = 1e9


def _frozen_set(tokens: Iterable[int]) -> frozenset[int]:
    return frozenset(tokens)


@attrs.frozen(eq=False)
class Request:
    """One prompt to continue.

    Attributes:
        prompt: token ids [L], L >= 1; an array is not copied until the request is admitted.
        max_new_tokens: most tokens to generate (>= 1).
        sampling: how tokens are chosen; greedy by default.
        stop_tokens: generating one of these ends the request; the token itself is emitted.
        priority: smaller is served first; waiting raises it, see ``EngineConfig.aging``.
        time_limit: seconds from submission to the last token, None for no limit.
        name: what events, metrics and traces call it; by default a number.

    Raises:
        ArgumentError: a field is out of range.
    """

    prompt: tuple[int, ...] | list[int] | NDArray[np.integer]
    max_new_tokens: int = 128
    sampling: SamplingParameters = GREEDY
    stop_tokens: frozenset[int] = attrs.field(default=frozenset(), converter=_frozen_set)
    priority: int = 0
    time_limit: float | None = None
    name: str | None = None

    def __attrs_post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ArgumentError("prompt", "no token", "at least 1 token")
        check_integer("max_new_tokens", self.max_new_tokens, least=1)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ArgumentError("priority", repr(self.priority), "an integer")
        if self.time_limit is not None:
            allowed = "seconds > 0, or None"
            check_number("time_limit", self.time_limit, allowed, least=1e-9, most=_ALL_SECONDS)


class FinishReason(enum.StrEnum):
    """Why a request finished."""

    LENGTH = "length"
    STOP = "stop"


class CancelReason(enum.StrEnum):
    """Why a request was cancelled."""

    CONSUMER = "consumer"  # the caller stopped listening, or its task was cancelled
    ENGINE_CLOSED = "engine_closed"  # the engine ended before the request did


class FailReason(enum.StrEnum):
    """Why a request failed."""

    TARGET_ERROR = "target_error"
    STEP_TIME_LIMIT = "step_time_limit"
    REQUEST_TIME_LIMIT = "request_time_limit"
    VERIFIER_ERROR = "verifier_error"


@attrs.frozen
class Tokens:
    """Tokens that one step added to a request; they are final.

    Attributes:
        name: the request's name.
        tokens: accepted drafts and one token of the target's own; at least one.
        drafted: drafted tokens that were verified in this step.
        accepted: how many of them were accepted; the stop token or the length limit may cut
            ``tokens`` shorter than ``accepted + 1``.
    """

    name: str
    tokens: tuple[int, ...]
    drafted: int
    accepted: int


@attrs.frozen
class Finished:
    """The request is complete: the last event."""

    name: str
    reason: FinishReason


@attrs.frozen
class Cancelled:
    """The request was given up: the last event."""

    name: str
    reason: CancelReason


@attrs.frozen
class Failed:
    """The request failed: the last event.

    Attributes:
        name: the request's name.
        reason: the kind of failure.
        detail: one sentence for people.
        error: the exception that caused it, None for a time limit.
    """

    name: str
    reason: FailReason
    detail: str
    error: BaseException | None = None


Ending: TypeAlias = Finished | Cancelled | Failed
"""How a request ends: exactly one of these, once, after all its tokens."""

Event: TypeAlias = Tokens | Ending
"""What ``generate`` yields."""
