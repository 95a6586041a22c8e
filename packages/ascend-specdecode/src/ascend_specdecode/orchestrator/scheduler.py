"""Which requests take part in the next step, and with how many tokens.

Order: priority, then arrival, where ``aging`` seconds of waiting are worth one level of priority.
Every running request that can decode gets a row in every step; what the token budget has left
goes to prompts, in order, in chunks. When memory runs out, speculation goes first, then the
request that is last in order gives its target state back.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs

from ascend_specdecode.errors import ArgumentError, QueueFullError
from ascend_specdecode.orchestrator.config import EngineConfig, WhenFull
from ascend_specdecode.orchestrator.lifetime import Lifetime

_PROMPT_SHARE: Final = 4  # one part in so many of the token budget is kept for prompts


@attrs.define(eq=False)
class Row:
    """One request's part in a step.

    Attributes:
        life: the request.
        end: verified tokens that the step computes up to; all of them for a decoding row.
        k: most drafted tokens that may follow them.
        whole: whether ``end`` is all verified tokens, so that the row emits.
        bonus: the token after its drafts when all of them were accepted; set when verified.
    """

    life: Lifetime
    end: int
    k: int
    whole: bool
    bonus: int | None = None

    @property
    def positions(self) -> int:
        """Positions that the target computes for it, at most."""
        return self.end - self.life.cached + self.k


class Scheduler:
    """The requests of an engine, by stage: at the door, waiting, running."""

    def __init__(self, config: EngineConfig, free: Callable[[Lifetime], None]) -> None:
        self._config = config
        self._free = free
        self._door: deque[Lifetime] = deque()
        self._waiting: dict[int, Lifetime] = {}
        self._heap: list[tuple[tuple[float, int], int]] = []
        self._running: dict[int, Lifetime] = {}
        self._used = 0

    @property
    def running(self) -> int:
        """Requests that hold target state or are about to."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place, those at the door included."""
        return len(self._waiting) + len(self._door)

    @property
    def cached_tokens(self) -> int:
        """Positions of target state that are counted as taken."""
        return self._used

    def live(self) -> list[Lifetime]:
        """Every request that has not been released."""
        return [*self._running.values(), *self._waiting.values(), *self._door]

    def check(self, prompt_length: int, max_new_tokens: int) -> None:
        """Refuse a request that no schedule could finish.

        Raises:
            ArgumentError: prompt and output exceed ``max_cached_tokens``.
            QueueFullError: the waiting queue is full and the engine refuses then.
        """
        limit = self._config.max_cached_tokens
        if limit is not None and prompt_length + max_new_tokens > limit:
            raise ArgumentError(
                "len(prompt) + max_new_tokens",
                f"{prompt_length} + {max_new_tokens}",
                f"at most max_cached_tokens ({limit})",
            )
        if self._full and self._config.when_full is WhenFull.REFUSE:
            raise QueueFullError(self.waiting)

    def submit(self, life: Lifetime) -> None:
        """Take a request in: into the waiting queue, or to the door where that is full."""
        if self._full:
            self._door.append(life)
        else:
            self._wait(life)

    def release(self, life: Lifetime) -> None:
        """Drop an ended request."""
        if self._running.pop(life.id, None) is not None:
            self._used -= life.reserved
            life.reserved = 0
        elif self._waiting.pop(life.id, None) is None and life in self._door:
            self._door.remove(life)
        self._open_door()

    def plan(self, k: int) -> list[Row]:
        """Choose the rows of the next step; none where nobody can go on.

        Args:
            k: drafted tokens that are wanted after each decoding request.
        """
        self._admit(k)
        decoding: list[Lifetime] = []
        prompts: list[Lifetime] = []
        for life in self._running.values():
            if life.ending is None and not life.paused:
                known = life.length - life.cached == 1 + life.unkept
                (decoding if known else prompts).append(life)
        if sum(1 + life.unkept for life in decoding) > self._config.max_num_batched_tokens:
            # Accepted tokens that must be computed again are then computed as prompts are.
            prompts += [life for life in decoding if life.unkept]
            decoding = [life for life in decoding if not life.unkept]
        k = self._affordable(k, decoding, prompts)
        rows = [
            Row(life, life.length, 0 if life.plain else min(k, life.remaining - 1), True)
            for life in decoding
        ]
        if prompts:
            left = self._config.max_num_batched_tokens - sum(row.positions for row in rows)
            rows += self._chunks(prompts, left)
        return self._fit_memory(rows)

    @property
    def _full(self) -> bool:
        return len(self._waiting) >= self._config.max_waiting

    def _wait(self, life: Lifetime) -> None:
        self._waiting[life.id] = life
        if len(self._heap) > 2 * len(self._waiting) + 16:  # most entries are of requests gone
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (life.order, life.id))

    def _open_door(self) -> None:
        while self._door and not self._full:
            self._wait(self._door.popleft())

    def _admit(self, k: int) -> None:
        while self._heap and len(self._running) < self._config.max_num_seqs:
            life = self._waiting.get(self._heap[0][1])
            if life is not None and not self._has_memory(life.length + 1 + k):
                return  # nobody overtakes: a large request would starve
            heapq.heappop(self._heap)
            if life is not None:
                del self._waiting[life.id]
                self._running[life.id] = life
                self._reserve(life, life.length)
                self._open_door()

    def _has_memory(self, positions: int) -> bool:
        limit = self._config.max_cached_tokens
        # The first request always fits: `check` refused those that are too large.
        return limit is None or not self._running or self._used + positions <= limit

    def _reserve(self, life: Lifetime, positions: int) -> None:
        self._used += positions - life.reserved
        life.reserved = positions

    def _affordable(self, k: int, decoding: Sequence[Lifetime], prompts: Iterable[Lifetime]) -> int:
        """Lower k where the token budget is short: a row is worth more than a draft."""
        budget = self._config.max_num_batched_tokens
        wanted = sum(life.length - life.cached for life in prompts)
        budget -= min(wanted, budget // _PROMPT_SHARE)
        if not decoding:
            return k
        budget -= sum(1 + life.unkept for life in decoding)
        return max(0, min(k, budget // len(decoding)))

    def _chunks(self, prompts: list[Lifetime], left: int) -> Iterable[Row]:
        for life in sorted(prompts, key=lambda one: one.order):
            part = min(life.length - life.cached, self._config.prefill_chunk, left)
            if part <= 0:
                return
            left -= part
            end = life.cached + part
            yield Row(life, end, 0, end == life.length)

    def _fit_memory(self, rows: list[Row]) -> list[Row]:
        """Reserve what the rows compute; make room where that is too much."""
        limit = self._config.max_cached_tokens
        if limit is not None and self._missing(rows, limit) > 0:
            for row in rows:
                row.k = 0
            rows = self._make_room(rows, limit)
        for row in rows:
            life, positions = row.life, row.end + row.k
            if positions > life.reserved:
                self._used += positions - life.reserved
                life.reserved = positions
        return rows

    def _missing(self, rows: list[Row], limit: int) -> int:
        more = sum(max(0, row.end + row.k - row.life.reserved) for row in rows)
        return self._used + more - limit

    def _make_room(self, rows: list[Row], limit: int) -> list[Row]:
        while self._missing(rows, limit) > 0:
            victim = max(self._running.values(), key=lambda one: (one.paused, one.order))
            rows = [row for row in rows if row.life is not victim]
            self._preempt(victim)
        return rows

    def _preempt(self, life: Lifetime) -> None:
        del self._running[life.id]
        self._reserve(life, 0)
        life.cached = life.unkept = 0
        life.proposal = None
        self._free(life)
        self._wait(life)
