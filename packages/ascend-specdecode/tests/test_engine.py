"""The engine: exact output in every mode, lifetimes, limits, degradation, drain."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from engine_support import both_loops, both_modes, complete, engine_of, is_whole, listen, settings

from ascend_specdecode import (
    AdaptiveConfig,
    ArgumentError,
    Cancelled,
    CancelReason,
    DraftedSequence,
    DrafterError,
    DraftVerify,
    EngineClosedError,
    EngineConfig,
    Failed,
    FailReason,
    Finished,
    FinishReason,
    Proposal,
    QueueFullError,
    Request,
    SequenceState,
    TargetError,
    Tokens,
)
from ascend_specdecode.simulator import (
    SimulatedDrafter,
    SimulatedTarget,
    SimulatedVerifier,
    continuation,
    run_virtual,
)

REQUESTS = [Request([number, 3, 4, 5][: number + 1], max_new_tokens=9) for number in range(4)]


@both_loops
@both_modes
@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", range(9))
def test_output_is_the_targets_own(backend: Any, mode: str, chance: float, k: int) -> None:
    drafter = SimulatedDrafter(chance, lambda k, rows: 0.1 * k)
    engine = engine_of(settings(mode=mode, num_speculative_tokens=k), drafter=drafter)
    found = complete(engine, REQUESTS, backend)
    assert all(is_whole(one, request) for one, request in zip(found, REQUESTS, strict=True))
    if k and chance == 1.0:
        assert engine.statistics.acceptance_length > 1.5


@both_loops
@both_modes
@pytest.mark.parametrize("adaptive", [None, AdaptiveConfig(warm_up=1)])
def test_tight_limits_change_no_token(
    backend: Any, mode: str, adaptive: AdaptiveConfig | None
) -> None:
    """Small batches, chunked prompts, memory for two of four requests, one event in the queue."""
    config = EngineConfig(
        mode=mode,
        adaptive=adaptive,
        max_num_seqs=3,
        max_num_batched_tokens=5,
        max_cached_tokens=26,
        prefill_chunk=2,
        max_waiting=1,
        max_queued_events=1,
    )
    engine = engine_of(config)
    found = complete(engine, REQUESTS, backend)
    assert all(is_whole(one, request) for one, request in zip(found, REQUESTS, strict=True))


@both_loops
def test_events_in_order(backend: Any) -> None:
    engine = engine_of(settings(num_speculative_tokens=2))
    request = Request([7, 1], max_new_tokens=5, name="seven")

    async def main() -> list[Any]:
        async with engine:
            return await listen(engine, request)

    events = run_virtual(main, backend)
    assert all(isinstance(event, Tokens) and event.name == "seven" for event in events[:-1])
    assert events[-1] == Finished("seven", FinishReason.LENGTH)
    assert events[0].drafted == 0  # the prompt's own step
    assert all(event.accepted <= event.drafted <= 2 for event in events[:-1])


@both_loops
def test_stop_token_ends_a_request_and_is_emitted(backend: Any) -> None:
    own = continuation([7, 1], 9)
    request = Request([7, 1], max_new_tokens=9, stop_tokens={own[4]})
    (found,) = complete(engine_of(settings()), [request], backend)
    assert found.ending == Finished("0", FinishReason.STOP)
    assert found.tokens == tuple(own[:5])


@both_loops
@both_modes
def test_no_drafter_is_plain_decoding(backend: Any, mode: str) -> None:
    target = SimulatedTarget(lambda batch: 1.0)
    engine = DraftVerify(target, None, settings(mode=mode), verifier=SimulatedVerifier())
    (found,) = complete(engine, REQUESTS[:1], backend)
    assert is_whole(found, REQUESTS[0])
    assert engine.statistics.drafts == 0
    assert engine.statistics.plain_rows == 9


def test_a_sequence_is_a_view_and_never_copied() -> None:
    """Every state of a 128k context shares one buffer until it must grow."""
    seen: list[SequenceState] = []

    class Watching(SimulatedTarget):
        async def score(self, batch: Sequence[DraftedSequence]) -> Any:
            seen.extend(row.sequence for row in batch)
            return await super().score(batch)

    engine = engine_of(settings(prefill_chunk=50_000, max_num_batched_tokens=60_000), Watching())
    request = Request([1] * 131_072, max_new_tokens=8)
    (found,) = complete(engine, [request], "asyncio")
    assert is_whole(found, request)
    assert len(seen) > 4
    assert all(state.origin is seen[0].origin for state in seen)
    assert all(state.verified.base is seen[0].verified.base for state in seen)
    assert [state.length for state in seen[:3]] == [50_000, 100_000, 131_072]


# A request ends by its consumer.


@both_loops
@both_modes
@pytest.mark.parametrize("how", ["break", "with", "cancel", "method", "garbage"])
def test_a_consumer_that_leaves_frees_its_state(backend: Any, mode: str, how: str) -> None:
    target, drafter = SimulatedTarget(lambda batch: 1.0), SimulatedDrafter(0.5)
    engine = engine_of(settings(mode=mode), target, drafter)
    request = Request([1, 2], max_new_tokens=100)

    async def leave() -> None:
        if how == "break":
            async for _ in engine.generate(request):
                break
        elif how == "with":
            async with engine.generate(request) as events:
                await anext(events)
        elif how == "cancel":
            with anyio.move_on_after(2.5):
                await engine.complete(request)
        elif how == "method":
            events = engine.generate(request)
            await anext(events)
            events.cancel()
            while not isinstance(await anext(events), Cancelled):
                pass
            with pytest.raises(StopAsyncIteration):
                await anext(events)
        else:
            events = engine.generate(request)
            await anext(events)
            cycle: list[Any] = [events]
            cycle.append(cycle)
            del events, cycle
            gc.collect()

    async def main() -> None:
        async with engine:
            await leave()
            await anyio.sleep(3.0)
            assert engine.load.running == 0
            assert not target.held
            assert not drafter.known
        assert engine.statistics.endings == {("cancelled", "consumer"): 1}

    run_virtual(main, backend)
    assert target.violations == drafter.violations == []


@both_loops
def test_a_request_limit_ends_exactly_its_request(backend: Any) -> None:
    hurried = Request([0], max_new_tokens=9, time_limit=3.5, name="hurried")
    patient = Request([1], max_new_tokens=9, time_limit=1000.0)
    found = complete(engine_of(settings(num_speculative_tokens=0)), [hurried, patient], backend)
    ending = found[0].ending
    assert isinstance(ending, Failed)
    assert ending.reason is FailReason.REQUEST_TIME_LIMIT
    assert ending.detail == "not complete 3.5 s after it was submitted"
    assert found[0].tokens == tuple(continuation([0], 3))  # what it had is exact
    assert is_whole(found[1], patient)


@both_loops
def test_a_request_limit_reaches_a_request_that_waits(backend: Any) -> None:
    engine = engine_of(settings(max_num_seqs=1, num_speculative_tokens=0))
    requests = [Request([0], max_new_tokens=9), Request([1], time_limit=2.0)]
    found = complete(engine, requests, backend)
    assert is_whole(found[0], requests[0])
    assert isinstance(found[1].ending, Failed)
    assert found[1].tokens == ()


# A target or verifier fails.


class FailingTarget(SimulatedTarget):
    """Fails once, at its third call, halfway: its state has grown already."""

    def __init__(self, error: Exception) -> None:
        super().__init__(lambda batch: 1.0)
        self.error = error

    async def score(self, batch: Sequence[DraftedSequence]) -> Any:
        scores = await super().score(batch)
        if self.watched.calls == 3:
            raise self.error
        return scores


@both_loops
@both_modes
def test_a_named_target_error_reaches_exactly_its_request(backend: Any, mode: str) -> None:
    target = FailingTarget(TargetError("bad block", [1]))
    engine = engine_of(settings(mode=mode), target)
    found = complete(engine, REQUESTS[1:4], backend)
    assert [type(one.ending) for one in found] == [Finished, Failed, Finished]
    assert is_whole(found[0], REQUESTS[1])
    assert is_whole(found[2], REQUESTS[3])
    assert found[1].ending.reason is FailReason.TARGET_ERROR
    assert found[1].ending.detail == "TargetError: bad block (sequences 1)"
    assert found[1].ending.error is target.error
    assert target.violations == []
    assert not target.held


@both_loops
@both_modes
def test_any_other_target_error_fails_the_batch_and_nobody_else(backend: Any, mode: str) -> None:
    target = FailingTarget(RuntimeError("device lost"))
    engine = engine_of(settings(mode=mode, max_num_seqs=2), target)
    found = complete(engine, REQUESTS[:4], backend)
    assert [type(one.ending) for one in found] == [Failed, Failed, Finished, Finished]
    assert found[0].ending.detail == "RuntimeError: device lost"
    assert is_whole(found[2], REQUESTS[2])
    assert is_whole(found[3], REQUESTS[3])


@both_loops
def test_a_step_limit_fails_the_batch(backend: Any) -> None:
    target = SimulatedTarget(lambda batch: 50.0 if len(target.streams) == 1 else 1.0)
    engine = engine_of(settings(score_time_limit=5.0, max_num_seqs=1), target)
    found = complete(engine, REQUESTS[:2], backend)
    assert isinstance(found[0].ending, Failed)
    assert found[0].ending.reason is FailReason.STEP_TIME_LIMIT
    assert found[0].ending.detail == "the target took more than 5 s for one step"
    assert is_whole(found[1], REQUESTS[1])


@pytest.mark.parametrize(
    ("emitted", "detail"),
    [
        ([], "the verifier returned 0 rows for 1"),
        ([[]], "0 tokens emitted for 0 drafted"),
        ([[1, 2]], "2 tokens emitted for 0 drafted"),
        ([[-1]], "the emitted id -1 is not a token"),
    ],
)
def test_what_a_verifier_must_not_emit_is_noticed(emitted: Any, detail: str) -> None:
    class Wrong:
        async def verify(self, batch: Any, scores: Any) -> Any:
            return emitted

    engine = engine_of(settings(), verifier=Wrong())
    (found,) = complete(engine, REQUESTS[3:], "asyncio")
    assert isinstance(found.ending, Failed)
    assert found.ending.reason is FailReason.VERIFIER_ERROR
    assert found.ending.detail == f"ProtocolError: {detail}"


def test_a_verifier_that_accepts_other_tokens_than_drafted_is_noticed() -> None:
    class Inventive(SimulatedVerifier):
        async def verify(self, batch: Any, scores: Any) -> Any:
            return [[number] * len(own) for number, own in enumerate(scores)]

    (found,) = complete(engine_of(settings(), verifier=Inventive()), REQUESTS[:1], "asyncio")
    assert isinstance(found.ending, Failed)
    assert "which accepts none of" in found.ending.detail


# A drafter fails.


class FailingDrafter(SimulatedDrafter):
    """Does one thing wrong, every time."""

    def __init__(self, wrong: Any) -> None:
        super().__init__(1.0, lambda k, rows: 0.1 * k)
        self.wrong = wrong

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> Any:
        proposals = await super().propose(sequences, k)
        if isinstance(self.wrong, Exception):
            raise self.wrong
        if callable(self.wrong):
            return self.wrong(proposals)
        await anyio.sleep(self.wrong)
        return proposals


WRONG: dict[str, Any] = {
    "error": ValueError("no weights"),
    "slow": 30.0,
    "too few": lambda proposals: proposals[:-1],
    "too many tokens": lambda proposals: [Proposal((1, 2, 3, 4, 5))] * len(proposals),
    "placeholder": lambda proposals: [Proposal((5, -1))] * len(proposals),
    "error of nobody": DrafterError("confused", [99]),
    "nonsense": lambda proposals: 7,
}


@both_loops
@both_modes
@pytest.mark.parametrize("name", WRONG)
def test_a_failing_drafter_costs_drafts_and_no_token(backend: Any, mode: str, name: str) -> None:
    config = settings(mode=mode, draft_time_limit=2.0, draft_failure_limit=2)
    engine = engine_of(config, drafter=FailingDrafter(WRONG[name]))
    found = complete(engine, REQUESTS, backend)
    assert all(is_whole(one, request) for one, request in zip(found, REQUESTS, strict=True))
    lost = engine.statistics.draft_timeouts if name == "slow" else engine.statistics.draft_errors
    assert lost == 2 * len(REQUESTS)
    assert engine.statistics.degraded_requests == len(REQUESTS)
    assert engine.statistics.drafts == 0


@both_loops
def test_a_drafter_error_that_names_a_sequence_degrades_only_that(backend: Any) -> None:
    class Choosy(SimulatedDrafter):
        async def propose(self, sequences: Sequence[SequenceState], k: int) -> Any:
            ids = [one.sequence_id for one in sequences]
            if 0 in ids:
                raise DrafterError("too long", [0])
            return await super().propose(sequences, k)

    engine = engine_of(settings(draft_failure_limit=1), drafter=Choosy(1.0))
    found = complete(engine, REQUESTS[:2], backend)
    assert all(is_whole(one, request) for one, request in zip(found, REQUESTS, strict=False))
    assert engine.statistics.degraded_requests == 1
    assert engine.statistics.drafts > 0


def test_probabilities_must_fit_the_tokens() -> None:
    torch = pytest.importorskip("torch")
    wrong = [Proposal((1, 2), torch.full((1, 9), 1 / 9))]
    engine = engine_of(settings(draft_failure_limit=1), drafter=FailingDrafter(lambda _: wrong))
    (found,) = complete(engine, REQUESTS[:1], "asyncio")
    assert is_whole(found, REQUESTS[0])
    assert engine.statistics.draft_errors == 1


# Admission and back-pressure.


@both_loops
def test_a_full_queue_refuses_or_makes_wait(backend: Any) -> None:
    refusing = engine_of(settings(max_num_seqs=1, max_waiting=1, when_full="refuse"))

    async def main() -> list[Any]:
        refused = []
        async with refusing, anyio.create_task_group() as group:
            for request in REQUESTS[:2]:
                group.start_soon(refusing.complete, request)
                await anyio.sleep(0.5)
            try:
                await refusing.complete(REQUESTS[2])
            except QueueFullError as error:
                refused.append(error)
        return refused

    (error,) = run_virtual(main, backend)
    assert error.waiting == 1
    assert "the limit of max_waiting" in str(error)
    waiting = engine_of(settings(max_num_seqs=1, max_waiting=1))
    found = complete(waiting, REQUESTS, backend)
    assert all(is_whole(one, request) for one, request in zip(found, REQUESTS, strict=True))


@both_loops
def test_a_slow_consumer_pauses_its_request_and_no_other(backend: Any) -> None:
    engine = engine_of(settings(num_speculative_tokens=0, max_queued_events=2))
    most, done = 0, 0.0

    async def slow() -> None:
        nonlocal most
        generation = engine.generate(Request([0], max_new_tokens=8))
        async for _ in generation:
            await anyio.sleep(10.0)
            if generation.ending is None:
                most = max(most, generation.pending)

    async def quick() -> None:
        nonlocal done
        start = anyio.current_time()
        await engine.complete(Request([1], max_new_tokens=8))
        done = anyio.current_time() - start

    async def main() -> None:
        async with engine, anyio.create_task_group() as group:
            group.start_soon(slow)
            group.start_soon(quick)

    run_virtual(main, backend)
    assert most == 2
    assert done == pytest.approx(8.0)


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = engine_of(settings(max_cached_tokens=20))

    async def main() -> None:
        async with engine:
            await engine.complete(Request([1] * 15, max_new_tokens=6))

    with pytest.raises(ArgumentError, match=r"found 15 \+ 6, allowed at most max_cached_tokens"):
        run_virtual(main)


# Opening and closing.


@both_loops
def test_leaving_the_block_drains(backend: Any) -> None:
    engine = engine_of(settings())
    found: list[Any] = []

    async def consume(request: Request) -> None:
        found.append(await engine.complete(request))

    async def main() -> None:
        async with anyio.create_task_group() as outside, engine:
            for request in REQUESTS:
                outside.start_soon(consume, request)
            await anyio.sleep(0.5)

    run_virtual(main, backend)
    assert len(found) == len(REQUESTS)
    assert all(isinstance(one.ending, Finished) for one in found)


@both_loops
def test_draining_has_an_end(backend: Any) -> None:
    """A consumer that never listens must not hold the engine open."""
    engine = engine_of(settings(max_queued_events=1, drain_time_limit=20.0))

    async def main() -> float:
        async with engine:
            generation = engine.generate(Request([1]))
            await anext(generation)
            start = anyio.current_time()
        assert generation.ending == Cancelled("0", CancelReason.ENGINE_CLOSED)
        return anyio.current_time() - start

    assert run_virtual(main, backend) == pytest.approx(20.0, abs=3.0)


@both_loops
def test_an_exception_in_the_block_comes_out_as_it_is(backend: Any) -> None:
    target = SimulatedTarget(lambda batch: 1.0)
    engine = engine_of(settings(), target)

    async def main() -> None:
        async with engine:
            generation = engine.generate(Request([1]))
            await anext(generation)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main, backend)
    assert not target.held
    assert engine.statistics.endings == {("cancelled", "engine_closed"): 1}


@both_loops
def test_requests_outside_the_block_are_refused(backend: Any) -> None:
    engine = engine_of(settings())

    async def main() -> None:
        with pytest.raises(EngineClosedError, match="is not open yet"):
            await engine.complete(REQUESTS[0])
        async with engine:
            with pytest.raises(EngineClosedError, match="was opened before"):
                await engine.__aenter__()
        with pytest.raises(EngineClosedError, match="is closed"):
            await engine.complete(REQUESTS[0])

    run_virtual(main, backend)


@both_loops
def test_a_bug_in_a_model_that_is_no_exception_ends_everything(backend: Any) -> None:
    """KeyboardInterrupt and the like are not handled: they come out, and nothing stays behind."""

    class Interrupted(BaseException):
        pass

    class Stopping(SimulatedTarget):
        async def score(self, batch: Any) -> Any:
            await super().score(batch)
            raise Interrupted

    target = Stopping(lambda batch: 1.0)
    engine = engine_of(settings(), target)

    async def main() -> None:
        async with engine:
            await engine.complete(REQUESTS[0])

    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(main, backend)
    assert caught.group_contains(Interrupted)
    assert not target.held
    assert engine.statistics.endings == {("cancelled", "consumer"): 1}


@both_loops
def test_a_target_that_fails_to_free_is_counted(backend: Any) -> None:
    class Sticky(SimulatedTarget):
        def free(self, sequence_id: int) -> None:
            raise RuntimeError("cannot")

    class Clingy(SimulatedDrafter):
        def forget(self, sequence_id: int) -> None:
            raise RuntimeError("cannot")

    engine = engine_of(settings(), Sticky(), Clingy(1.0))
    (found,) = complete(engine, REQUESTS[:1], backend)
    assert is_whole(found, REQUESTS[0])
    assert engine.statistics.release_errors == 2


@both_loops
def test_a_failed_rollback_fails_its_request(backend: Any) -> None:
    class Rigid(SimulatedTarget):
        def roll_back(self, sequence_id: int, length: int) -> None:
            raise RuntimeError("cannot shrink")

    (found,) = complete(
        engine_of(settings(), Rigid(), SimulatedDrafter(0.0)), REQUESTS[:1], backend
    )
    assert isinstance(found.ending, Failed)
    assert found.ending.detail == "RuntimeError: cannot shrink"


def test_requests_without_a_seed_get_different_ones_and_a_seed_is_kept() -> None:
    seen: dict[int, int] = {}

    class Watching(SimulatedTarget):
        async def score(self, batch: Sequence[DraftedSequence]) -> Any:
            seen.update({self.stream(row): row.sequence.seed for row in batch})
            return await super().score(batch)

        def stream(self, row: DraftedSequence) -> int:
            return int(row.sequence.verified[0])

    from ascend_specdecode import SamplingParameters

    chosen = Request([3], 1, SamplingParameters(seed=1234))
    for _ in range(2):
        requests = [Request([number], 1) for number in range(3)]
        complete(engine_of(settings(seed=5), Watching()), [*requests, chosen], "asyncio")
        assert seen[3] == 1234
        assert len(set(seen.values())) == 4
    again = dict(seen)
    complete(engine_of(settings(seed=5), Watching()), [*requests, chosen], "asyncio")
    assert seen == again
