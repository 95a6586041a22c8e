"""Budgets, memory, priorities and fairness, looked at from the batches that the target sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from engine_support import both_loops, both_modes, complete, engine_of, is_whole, settings
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import DraftedSequence, Request, SequenceOrigin, TokenBuffer
from ascend_specdecode.orchestrator.lifetime import Lifetime
from ascend_specdecode.orchestrator.scheduler import Scheduler
from ascend_specdecode.simulator import SimulatedDrafter, SimulatedTarget, run_virtual


class Recording(SimulatedTarget):
    """Keeps (stream, computed positions, drafted tokens, emits) of every row of every call."""

    def __init__(self) -> None:
        super().__init__(lambda batch: 1.0)
        self.batches: list[list[tuple[int, int, int, bool]]] = []
        self.most_held = 0

    async def score(self, batch: Sequence[DraftedSequence]) -> Any:
        scores = await super().score(batch)
        rows = []
        for row in batch:
            drafted = len(row.proposal.tokens)
            computed = row.sequence.length - row.cached_length + drafted
            stream = self.streams[row.sequence.sequence_id]
            rows.append((stream, computed, drafted, row.needs_scores))
        self.batches.append(rows)
        self.most_held = max(self.most_held, sum(map(len, self.held.values())))
        return scores

    def first_call_of(self, stream: int) -> int:
        return next(i for i, rows in enumerate(self.batches) if any(r[0] == stream for r in rows))


requests = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(-2, 2)), min_size=1, max_size=5
)


@given(
    wanted=requests,
    sequences=st.integers(1, 4),
    extra=st.integers(0, 8),
    memory=st.one_of(st.none(), st.integers(20, 40)),
    chunk=st.integers(1, 6),
    k=st.integers(0, 4),
    mode=st.sampled_from(["lockstep", "pipelined"]),
    branches=st.sampled_from([1, 2, 3]),
)
def test_every_budget_holds_in_every_step(
    wanted: list[tuple[int, int, int]],
    sequences: int,
    extra: int,
    memory: int | None,
    chunk: int,
    k: int,
    mode: str,
    branches: int,
) -> None:
    config = settings(
        mode=mode,
        num_speculative_tokens=k,
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences + extra,
        max_cached_tokens=memory,
        prefill_chunk=chunk,
    )
    asked = [
        Request([number] * length, max_new_tokens=count, priority=priority)
        for number, (length, count, priority) in enumerate(wanted)
    ]
    target, drafter = Recording(), SimulatedDrafter(0.5, branches=branches)
    found = complete(engine_of(config, target, drafter), asked, "asyncio")
    assert all(is_whole(one, request) for one, request in zip(found, asked, strict=True))
    for batch in target.batches:
        assert len(batch) <= sequences
        assert sum(computed for _, computed, _, _ in batch) <= sequences + extra
        assert all(drafted <= k for _, _, drafted, _ in batch)
        assert all(computed <= chunk for _, computed, _, emits in batch if not emits)
    assert memory is None or target.most_held <= memory


def test_tokens_to_compute_again_wait_where_positions_are_short() -> None:
    """Requests that paused come back with accepted tokens whose state was not kept."""
    config = settings(max_num_seqs=3, max_num_batched_tokens=5)
    scheduler = Scheduler(config, lambda life: None)
    lives = [life_of(number, 6) for number in range(3)]
    for life in lives:
        scheduler.submit(life)
    scheduler.plan(0)
    for life, unkept in zip(lives, (3, 0, 2), strict=True):
        life.unkept, life.cached = unkept, 5 - unkept
    rows = {row.life.id: row for row in scheduler.plan(2)}
    assert sum(row.positions for row in rows.values()) <= 5
    assert (rows[1].end, rows[1].whole) == (6, True)  # the one that is up to date goes first
    assert rows[0].k == 0
    # Where there is room all go on as they are, and what is left is shared out for drafts.
    roomy = Scheduler(settings(max_num_seqs=3, max_num_batched_tokens=14), lambda life: None)
    for life in lives:
        life.cached, life.unkept = 0, 0
        roomy.submit(life)
    roomy.plan(0)
    for life, unkept in zip(lives, (3, 0, 2), strict=True):
        life.unkept, life.cached = unkept, 5 - unkept
    assert [(row.positions, row.k, row.whole) for row in roomy.plan(4)] == [
        (6, 2, True),
        (3, 2, True),
        (5, 2, True),
    ]


def life_of(number: int, length: int) -> Lifetime:
    origin = SequenceOrigin(number, TokenBuffer([number] * length), length)
    request = Request([number] * length, max_new_tokens=20)
    nothing: Any = lambda *_: None  # noqa: E731 - no engine listens
    return Lifetime(
        request, str(number), origin, order=(0.0, number), now=0.0, limit=9,
        on_end=nothing, on_room=nothing,
    )  # fmt: skip


def test_the_first_requests_prompt_is_scored_before_anything_is_drafted() -> None:
    """A prompt of k + 1 tokens looks like a decode row; it is the whole prompt's first step."""
    target = Recording()
    request = Request([0, 1, 2, 3], max_new_tokens=6)
    complete(engine_of(settings(num_speculative_tokens=3), target), [request], "asyncio")
    assert target.batches[0] == [(0, 4, 0, True)]
    assert target.batches[1][0][1:3] == (4, 3)


@both_modes
def test_a_long_prompt_does_not_stop_the_others(mode: str) -> None:
    """While 100 prompt tokens are computed in chunks, the short request decodes in every step."""
    target = Recording()
    config = settings(mode=mode, num_speculative_tokens=0, prefill_chunk=10)
    asked = [Request([0, 1], max_new_tokens=12), Request([1] * 100, max_new_tokens=3)]
    complete(engine_of(config, target), asked, "asyncio")
    chunks = [batch for batch in target.batches if any(not row[3] for row in batch)]
    assert len(chunks) == 9
    assert all(any(row[0] == 0 for row in batch) for batch in chunks)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    target = Recording()
    config = settings(num_speculative_tokens=0, prefill_chunk=10, max_num_batched_tokens=256)
    asked = [Request([0] * 500, max_new_tokens=1), Request([1] * 10, max_new_tokens=1)]
    complete(engine_of(config, target), asked, "asyncio")
    assert target.first_call_of(1) <= 1


def test_speculation_gives_way_to_rows() -> None:
    """Eight rows and twelve positions: everybody decodes, nobody drafts more than fits."""
    target = Recording()
    config = settings(num_speculative_tokens=4, max_num_seqs=8, max_num_batched_tokens=12)
    asked = [Request([number], max_new_tokens=6) for number in range(8)]
    complete(engine_of(config, target), asked, "asyncio")
    assert any(len(batch) == 8 for batch in target.batches)
    full = [batch for batch in target.batches if len(batch) == 8]
    assert all(drafted == 0 for batch in full for _, _, drafted, _ in batch)


@pytest.mark.parametrize(("aging", "expected"), [(None, [3, 2, 1]), (1e-3, [1, 2, 3])])
def test_priority_decides_unless_waiting_outweighs_it(
    aging: float | None, expected: list[int]
) -> None:
    """With one place: smaller priority first; with fast aging the order of arrival."""
    target = Recording()
    engine = engine_of(settings(max_num_seqs=1, aging=aging), target)
    asked = [Request([number], max_new_tokens=3, priority=-number) for number in range(4)]
    complete(engine, asked, "asyncio")
    order = sorted(range(1, 4), key=target.first_call_of)
    assert order == expected


def test_a_low_priority_request_is_not_starved() -> None:
    """More urgent requests arrive faster than they are served; the first one has its turn."""
    target = Recording()
    engine = engine_of(settings(max_num_seqs=1, aging=2.0, num_speculative_tokens=0), target)

    async def main() -> None:
        async with engine, anyio.create_task_group() as group:
            for number in range(20):
                priority = 5 if number == 1 else 0
                request = Request([number], max_new_tokens=3, priority=priority)
                group.start_soon(engine.complete, request)
                await anyio.sleep(1.0)

    run_virtual(main)
    assert target.first_call_of(1) < target.first_call_of(19)
    assert target.first_call_of(1) > target.first_call_of(3)  # it did have to let others pass


@both_loops
@both_modes
def test_preempted_requests_lose_nothing(backend: Any, mode: str) -> None:
    target = Recording()
    engine = engine_of(settings(mode=mode, max_cached_tokens=24, num_speculative_tokens=2), target)
    asked = [Request([number] * 4, max_new_tokens=14) for number in range(4)]
    found = complete(engine, asked, backend)
    assert all(is_whole(one, request) for one, request in zip(found, asked, strict=True))
    assert engine.statistics.preemptions > 0
    assert target.most_held <= 24
    assert engine.load.cached_tokens == 0


def test_a_paused_request_gives_its_memory_to_those_who_can_go_on() -> None:
    engine = engine_of(
        settings(max_cached_tokens=20, max_queued_events=1, num_speculative_tokens=0)
    )
    done: list[Any] = []

    async def main() -> None:
        async with engine:
            lazy = engine.generate(Request([0] * 6, max_new_tokens=10))
            await anext(lazy)
            with anyio.fail_after(60):
                done.append(await engine.complete(Request([1] * 6, max_new_tokens=14)))
            tokens = [event async for event in lazy]
            assert len(tokens) == 10

    run_virtual(main)
    assert len(done[0].tokens) == 14
