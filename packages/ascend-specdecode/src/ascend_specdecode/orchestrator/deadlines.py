"""Ends requests whose time limit has passed, wherever they are."""

from __future__ import annotations

import heapq
from typing import Never

import anyio

from ascend_specdecode.orchestrator.lifetime import Lifetime
from ascend_specdecode.requests import Failed, FailReason


class Deadlines:
    """The time limits of an engine's requests, watched by one task."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Lifetime]] = []
        self._live = 0
        self._earlier = anyio.Event()

    def add(self, life: Lifetime) -> None:
        """Watch a request, where it has a time limit."""
        limit = life.request.time_limit
        if limit is None:
            return
        self._live += 1
        heapq.heappush(self._heap, (life.submitted + limit, life.id, life))
        if self._heap[0][2] is life:
            self._earlier.set()

    def remove(self, life: Lifetime) -> None:
        """Stop watching a request that ended."""
        if life.request.time_limit is None:
            return
        self._live -= 1
        if len(self._heap) > 2 * self._live + 16:  # entries of ended requests hold their prompts
            self._heap = [entry for entry in self._heap if entry[2].ending is None]
            heapq.heapify(self._heap)

    async def watch(self) -> Never:
        """End requests when their time has passed; runs until it is cancelled."""
        while True:
            self._end_late()
            deadline = self._heap[0][0] if self._heap else float("inf")
            self._earlier = anyio.Event()
            with anyio.CancelScope(deadline=deadline):
                await self._earlier.wait()

    def _end_late(self) -> None:
        now = anyio.current_time()
        while self._heap and (self._heap[0][2].ending is not None or self._heap[0][0] <= now):
            life = heapq.heappop(self._heap)[2]
            detail = f"not complete {life.request.time_limit:g} s after it was submitted"
            life.end(Failed(life.name, FailReason.REQUEST_TIME_LIMIT, detail))
