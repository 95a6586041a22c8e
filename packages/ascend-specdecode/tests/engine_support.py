"""What tests of the engine share: both event loops, virtual time, simulated models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from ascend_specdecode import (
    Completion,
    DraftVerify,
    EngineConfig,
    Event,
    Finished,
    Request,
)
from ascend_specdecode.simulator import (
    SimulatedDrafter,
    SimulatedTarget,
    SimulatedVerifier,
    continuation,
    run_virtual,
)

both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])
both_modes = pytest.mark.parametrize("mode", ["lockstep", "pipelined"])


def settings(**changes: Any) -> EngineConfig:
    """Settings without adaptive k, so that a test knows what is drafted."""
    return EngineConfig(**({"adaptive": None} | changes))


def engine_of(
    config: EngineConfig,
    target: SimulatedTarget | None = None,
    drafter: SimulatedDrafter | None = None,
    verifier: Any = None,
) -> DraftVerify[Any]:
    """An engine of simulated models; scoring takes a second, drafting a tenth for each token."""
    return DraftVerify(
        target or SimulatedTarget(lambda batch: 1.0),
        drafter or SimulatedDrafter(0.8, lambda k, rows: 0.1 * k),
        config,
        verifier=verifier or SimulatedVerifier(),
    )


async def listen(engine: DraftVerify[Any], request: Request) -> list[Event]:
    """All events of a request."""
    return [event async for event in engine.generate(request)]


def complete(engine: DraftVerify[Any], requests: Sequence[Request], backend: Any) -> list[Any]:
    """Run requests together; their completions in order."""
    found: dict[int, Completion] = {}

    async def one(number: int, request: Request) -> None:
        await anyio.sleep(number * 1e-3)  # trio starts tasks in any order
        found[number] = await engine.complete(request)

    async def main() -> None:
        async with engine, anyio.create_task_group() as group:
            for number, request in enumerate(requests):
                group.start_soon(one, number, request)

    run_virtual(main, backend)
    return [found[number] for number in range(len(requests))]


def is_whole(completion: Completion, request: Request) -> bool:
    """Whether the completion is what the target says after the prompt, all of it."""
    own = continuation([int(token) for token in request.prompt], request.max_new_tokens)
    finished = isinstance(completion.ending, Finished)
    return finished and completion.tokens == tuple(own)
