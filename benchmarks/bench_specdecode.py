"""Cost of orchestration: the engine with models that take no time, against a loop by hand.

    python benchmarks/bench_specdecode.py [--repeats 5] [--json PATH]

Both sides serve the same requests on asyncio: batch, draft, score, verify, append, hand to one
consumer task per request through a bounded queue. The loop by hand has nothing else: no limits, no
cancellation, no accounting. Neither side waits for anything, so CPU time is counted, in
microseconds per request and step. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import anyio
from ratios import Ratio, options, report

from ascend_specdecode import DraftVerify, EngineConfig, Proposal, Request, Tokens

K = 4
STEPS = 60
EMITTED = (1, 2, 7)  # two drafted tokens accepted, the third replaced
DRAFTED = [Proposal((1, 2, 3, 4)[:k]) for k in range(K + 1)]
WIDTHS = (16, 64, 256, 1024)


class FreeDrafter:
    """Proposes the same for everybody, at no cost."""

    async def propose(self, sequences: Sequence[Any], k: int) -> Sequence[Proposal]:
        return [DRAFTED[k]] * len(sequences)

    def forget(self, sequence_id: int) -> None:
        """Nothing is held."""


class FreeTarget:
    """Scores at no cost."""

    async def score(self, batch: Sequence[Any]) -> int:
        return len(batch)

    def roll_back(self, sequence_id: int, length: int) -> None:
        """Nothing is held."""

    def free(self, sequence_id: int) -> None:
        """Nothing is held."""


class FreeVerifier:
    """Accepts two drafted tokens of everybody, at no cost."""

    async def verify(self, batch: Sequence[Any], scores: int) -> Sequence[Sequence[int]]:
        return [EMITTED] * scores


async def by_engine(width: int) -> float:
    """Serve ``width`` requests with the engine; return seconds."""
    config = EngineConfig(
        num_speculative_tokens=K,
        adaptive=None,
        max_num_seqs=width,
        max_num_batched_tokens=width * (K + 1),
        max_waiting=width,
    )
    request = Request([1], max_new_tokens=STEPS * len(EMITTED))

    async def consume(engine: DraftVerify[int]) -> None:
        tokens: list[int] = []
        async for event in engine.generate(request):
            if isinstance(event, Tokens):
                tokens.extend(event.tokens)
        assert len(tokens) == request.max_new_tokens

    start = time.process_time()
    target, drafter, verifier = FreeTarget(), FreeDrafter(), FreeVerifier()
    async with DraftVerify(target, drafter, config, verifier=verifier) as engine:
        async with anyio.create_task_group() as group:
            for _ in range(width):
                group.start_soon(consume, engine)
        assert engine.statistics.steps == STEPS
    return time.process_time() - start


async def by_hand(width: int) -> float:
    """Serve ``width`` requests with a plain loop; return seconds."""
    drafter, target, verifier = FreeDrafter(), FreeTarget(), FreeVerifier()
    wanted = STEPS * len(EMITTED)
    queues: list[asyncio.Queue[Any]] = [asyncio.Queue(64) for _ in range(width)]
    contexts = [[1] for _ in range(width)]

    async def consume(queue: asyncio.Queue[Any]) -> None:
        tokens: list[int] = []
        while (found := await queue.get()) is not None:
            tokens.extend(found)
        assert len(tokens) == wanted

    async def serve() -> None:
        active = list(range(width))
        while active:
            rows = [contexts[index] for index in active]
            proposals = await drafter.propose(rows, K)
            batch = [(row, one.tokens) for row, one in zip(rows, proposals, strict=True)]
            emitted = await verifier.verify(batch, await target.score(batch))
            for index, tokens in zip(active, emitted, strict=True):
                contexts[index].extend(tokens)
                await queues[index].put(tokens)
                if len(contexts[index]) > wanted:
                    await queues[index].put(None)
            active = [index for index in active if len(contexts[index]) <= wanted]
            await asyncio.sleep(0)

    start = time.process_time()
    consumers = [asyncio.create_task(consume(queue)) for queue in queues]
    await serve()
    await asyncio.gather(*consumers)
    return time.process_time() - start


Side = Callable[[int], Coroutine[Any, Any, float]]


def microseconds(side: Side, width: int) -> float:
    """One run of one side, per request and step."""
    return anyio.run(side, width) / (width * STEPS) * 1e6


def ratios(repeats: int) -> Iterator[Ratio]:
    """All ratios."""
    # As servers do after start (vLLM too): garbage collections then skip the modules of torch.
    gc.collect()
    gc.freeze()
    taken: dict[tuple[str, int], list[float]] = {}
    sides: dict[str, Side] = {"engine": by_engine, "by hand": by_hand}
    for turn in range(repeats + 1):
        for width in WIDTHS:
            for name, side in sides.items():
                spent = microseconds(side, width)
                if turn:  # the first turn warms up
                    taken.setdefault((name, width), []).append(spent)
    cost = {key: statistics.median(times) for key, times in taken.items()}
    detail = {f"{name} us": cost[name, 256] for name in sides}
    name = "orchestration: engine / asyncio loop by hand, 256 requests"
    yield Ratio(name, cost["engine", 256] / cost["by hand", 256], "<= 3", detail)
    widths = [cost["engine", width] for width in WIDTHS]
    detail = {f"{width} requests us": cost["engine", width] for width in WIDTHS}
    name = "orchestration per request and step: 1024 requests / 16"
    yield Ratio(name, widths[-1] / widths[0], "<= 1.25", detail)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parsed = parser.parse_args()
    return report(ratios(parsed.repeats), parsed.json)


if __name__ == "__main__":
    sys.exit(main())
