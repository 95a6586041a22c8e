"""A request is cancelled at every single point where the event loop can switch tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from ascend_specdecode import Cancelled, CancelReason, DraftVerify, EngineConfig, Request, Tokens
from ascend_specdecode.simulator import (
    Backend,
    SimulatedDrafter,
    SimulatedTarget,
    SimulatedVerifier,
    VirtualTimeLoop,
    continuation,
)

WANTED = 10


class Points:
    """Counts the points of a run and calls ``act`` at one of them."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.count = 0
        self._at, self._act = at, act

    def passed(self) -> None:
        self.count += 1
        if self.count == self._at:
            self._act()


class CountingLoop(VirtualTimeLoop):
    """Passes a point before every turn of the loop."""

    points: Points

    def _run_once(self) -> None:
        self.points.passed()
        super()._run_once()  # type: ignore[misc]


def run_counted(
    function: Callable[[], Any], backend: Backend, act: Callable[[], None], at: int
) -> int:
    """Run in virtual time, act at a point; return how many points there were."""
    points = Points(at, act)
    if backend == "asyncio":

        def loop() -> CountingLoop:
            made = CountingLoop()
            made.points = points
            return made

        anyio.run(function, backend=backend, backend_options={"loop_factory": loop})
        return points.count
    trio = pytest.importorskip("trio")
    testing = pytest.importorskip("trio.testing")

    class Counter(trio.abc.Instrument):  # type: ignore[misc, name-defined]
        def before_task_step(self, task: Any) -> None:
            points.passed()

    clock = testing.MockClock(autojump_threshold=0)
    trio.run(function, clock=clock, instruments=[Counter()])
    return points.count


class Scene:
    """Two requests in one engine; the first can be cancelled."""

    def __init__(self, mode: str, what: str) -> None:
        self.target = SimulatedTarget(lambda batch: 1.0)
        self.drafter = SimulatedDrafter(0.7, lambda k, rows: 0.3 * k, seed=3)
        config = EngineConfig(
            mode=mode, num_speculative_tokens=2, adaptive=None, prefill_chunk=2, max_num_seqs=2
        )
        self.engine = DraftVerify(self.target, self.drafter, config, verifier=SimulatedVerifier())
        self.what = what
        self.scopes: dict[str, anyio.CancelScope] = {}
        self.tokens: dict[int, list[int]] = {0: [], 1: []}
        self.endings: dict[int, Any] = {}

    def cancel(self) -> None:
        scope = self.scopes.get(self.what)
        if scope is not None:
            scope.cancel()

    async def main(self) -> None:
        with anyio.fail_after(1000), anyio.CancelScope() as self.scopes["engine"]:
            async with self.engine, anyio.create_task_group() as group:
                group.start_soon(self.first)
                group.start_soon(self.listen, 1)

    async def first(self) -> None:
        with anyio.CancelScope() as self.scopes["request"]:
            await self.listen(0)

    async def listen(self, stream: int) -> None:
        generation = self.engine.generate(Request([stream, 5, 6], max_new_tokens=WANTED))
        try:
            async for event in generation:
                if isinstance(event, Tokens):
                    self.tokens[stream] += event.tokens
        finally:
            self.endings[stream] = generation.ending

    def check(self, at: int) -> None:
        assert not self.target.held, at
        assert not self.drafter.known, at
        assert not self.drafter.seen, at
        assert self.target.violations == self.drafter.violations == [], at
        assert self.engine.load == type(self.engine.load)(0, 0, 0), at
        for stream, tokens in self.tokens.items():
            own = continuation([stream, 5, 6], WANTED)
            assert tokens == own[: len(tokens)], at
            if self.what == "request" and stream == 1:
                assert tokens == own, at  # its neighbour notices nothing
        submitted = [ending for ending in self.endings.values() if ending is not None]
        assert sum(self.engine.statistics.endings.values()) == len(submitted)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("mode", ["lockstep", "pipelined"])
@pytest.mark.parametrize("what", ["request", "engine"])
def test_cancelled_at_every_point(what: str, mode: str, backend: Backend) -> None:
    undisturbed = Scene(mode, what)
    points = run_counted(undisturbed.main, backend, lambda: None, -1)
    assert undisturbed.tokens == {one: continuation([one, 5, 6], WANTED) for one in (0, 1)}
    cancelled = 0
    for at in range(1, points):
        scene = Scene(mode, what)
        run_counted(scene.main, backend, scene.cancel, at)
        scene.check(at)
        reasons = {CancelReason.CONSUMER, CancelReason.ENGINE_CLOSED}
        ending = scene.endings.get(0)
        cancelled += isinstance(ending, Cancelled) and ending.reason in reasons
    # Many points are in the life of the request, so this did cancel it in many places.
    assert cancelled > points / 4
