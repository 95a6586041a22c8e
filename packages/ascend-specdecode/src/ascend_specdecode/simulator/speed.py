"""How fast a schedule is with simulated costs: one engine, many requests, virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import attrs

from ascend_specdecode.adaptive.controller import SpeculationReport
from ascend_specdecode.arguments import check_integer
from ascend_specdecode.observability.statistics import Statistics
from ascend_specdecode.observability.trace import Trace
from ascend_specdecode.orchestrator.config import EngineConfig
from ascend_specdecode.orchestrator.engine import Completion, DraftVerify
from ascend_specdecode.protocols import DraftedSequence
from ascend_specdecode.requests import Request
from ascend_specdecode.simulator.clock import Backend, run_virtual
from ascend_specdecode.simulator.models import (
    Chance,
    SimulatedDrafter,
    SimulatedTarget,
    SimulatedVerifier,
)


@attrs.frozen
class Workload:
    """Requests that all start at once, and how well they can be drafted.

    Attributes:
        requests: how many.
        prompt: tokens of each prompt.
        tokens: tokens that each generates.
        chance: how likely a drafted token is right, a number or by stream and position.
        seed: of which tokens are right.

    Raises:
        ArgumentError: a count is below 1.
    """

    requests: int = 16
    prompt: int = 64
    tokens: int = 256
    chance: Chance | float = 0.8
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("requests", "prompt", "tokens"):
            check_integer(name, getattr(self, name), least=1)


@attrs.frozen(eq=False)
class SpeedResult:
    """What a run took, in virtual seconds.

    Attributes:
        seconds: from the first submission to the last token.
        tokens: generated over all requests.
        completions: what each request got.
        statistics: the engine's counters.
        speculation: what it knew about drafting at the end.
        trace: its newest spans.
    """

    seconds: float
    tokens: int
    completions: Sequence[Completion]
    statistics: Statistics
    speculation: SpeculationReport
    trace: Trace

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests per virtual second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def measure_speed(
    workload: Workload,
    config: EngineConfig,
    *,
    score_seconds: Callable[[Sequence[DraftedSequence]], float],
    draft_seconds: Callable[[int, int], float],
    backend: Backend = "asyncio",
) -> SpeedResult:
    """Run a workload in virtual time.

    Args:
        workload: the requests.
        config: the engine's settings.
        score_seconds: what scoring a batch takes.
        draft_seconds: what drafting (k, rows) takes.
        backend: the event loop.
    """

    async def run() -> SpeedResult:
        target = SimulatedTarget(score_seconds)
        drafter = SimulatedDrafter(workload.chance, draft_seconds, seed=workload.seed)
        engine = DraftVerify(target, drafter, config, verifier=SimulatedVerifier())
        completions: list[Completion] = []

        async def consume(number: int) -> None:
            prompt = [number] * workload.prompt
            found = await engine.complete(Request(prompt, max_new_tokens=workload.tokens))
            completions.append(found)

        start = anyio.current_time()
        async with engine, anyio.create_task_group() as group:
            for number in range(workload.requests):
                group.start_soon(consume, number)
        seconds = anyio.current_time() - start
        tokens = sum(len(one.tokens) for one in completions)
        known = engine.speculation()
        return SpeedResult(seconds, tokens, completions, engine.statistics, known, engine.trace)

    return run_virtual(run, backend)
