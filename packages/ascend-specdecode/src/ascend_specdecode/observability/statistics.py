"""What an engine counts: plain numbers that tables, metrics and reports are made from."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final

import attrs

from ascend_specdecode.requests import Ending

# Upper bounds in seconds, those of vLLM's histograms of the same names.
FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class Histogram:
    """Counts of values by upper bound, in the way of Prometheus.

    Attributes:
        bounds: upper bounds, ascending; a last bucket without bound follows.
        counts: values in each bucket, not cumulative.
        total: sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean value, 0 before the first."""
        return self.total / self.count if self.count else 0.0


@attrs.define(eq=False)
class Statistics:
    """Counters of one engine since it was made; read them at any time.

    Attributes:
        drafted: drafted tokens that were verified, by position (first drafted token first).
        accepted: those of them that were accepted, by position.
        drafts: verified rows that had drafted tokens.
        plain_rows: verified rows without any.
        steps: target calls that were verified.
        prompt_tokens: prompt tokens of admitted requests.
        generation_tokens: tokens emitted.
        draft_errors: drafts of single requests lost to an error of the drafter.
        draft_timeouts: drafts of single requests lost to the draft time limit.
        degraded_requests: requests that went on without drafts for good.
        ahead_used: drafts made ahead whose guess came true.
        ahead_discarded: drafts made ahead that were thrown away.
        preemptions: times a request gave back its target state for lack of memory.
        release_errors: times a target or drafter raised when told to drop a sequence.
        endings: requests ended, by (kind, reason).
        draft_seconds: time spent in ``propose``; may overlap with score_seconds.
        score_seconds: time spent in ``score``.
        verify_seconds: time spent in ``verify``.
        first_token: seconds from submission to the first token.
        inter_token: seconds from one event of a request to the next, divided by its tokens.
        request: seconds from submission to the end, finished requests only.
    """

    drafted: list[int] = attrs.field(factory=list)
    accepted: list[int] = attrs.field(factory=list)
    drafts: int = 0
    plain_rows: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_errors: int = 0
    draft_timeouts: int = 0
    degraded_requests: int = 0
    ahead_used: int = 0
    ahead_discarded: int = 0
    preemptions: int = 0
    release_errors: int = 0
    endings: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    draft_seconds: float = 0.0
    score_seconds: float = 0.0
    verify_seconds: float = 0.0
    first_token: Histogram = attrs.field(factory=lambda: Histogram(FIRST_TOKEN_BUCKETS))
    inter_token: Histogram = attrs.field(factory=lambda: Histogram(INTER_TOKEN_BUCKETS))
    request: Histogram = attrs.field(factory=lambda: Histogram(REQUEST_BUCKETS))

    def verified(self, rows: int, drafted: Sequence[int], accepted: int) -> None:
        """Count verified rows that had the same numbers of drafted and accepted tokens.

        Args:
            rows: how many.
            drafted: drafted tokens by position: 1 each in a chain, siblings of a tree together.
            accepted: accepted tokens.
        """
        if not drafted:
            self.plain_rows += rows
            return
        self.drafts += rows
        while len(self.drafted) < len(drafted):
            self.drafted.append(0)
            self.accepted.append(0)
        for position, count in enumerate(drafted):
            self.drafted[position] += count * rows
        for position in range(accepted):
            self.accepted[position] += rows

    def ended(self, ending: Ending) -> None:
        """Count the end of a request."""
        self.endings[type(ending).__name__.lower(), ending.reason.value] += 1

    @property
    def acceptance_length(self) -> float:
        """Mean tokens emitted by a row that had drafts, the bonus token included; 0 before one."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else 0.0

    def acceptance_per_position(self) -> list[float]:
        """Accepted share of all drafts, by position, as vLLM reports it.

        The base of every position is the number of drafts, so a position that few drafts reach
        counts as not accepted in the others.
        """
        return [accepted / self.drafts for accepted in self.accepted]
