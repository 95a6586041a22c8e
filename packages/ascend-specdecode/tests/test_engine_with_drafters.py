"""Every drafter in the engine: greedy requests get the target's own tokens, seeded ones repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import attrs
import pytest
import torch
from drafter_support import (
    VOCABULARY,
    FakeBlock,
    FakeLayer,
    FakeModel,
    digest,
    logits_after,
    target_hidden,
)

from ascend_specdecode import (
    BlockDrafter,
    DraftedSequence,
    DraftVerify,
    EngineConfig,
    FirstDrafter,
    HiddenStateDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    RaceDrafter,
    Request,
    SamplingParameters,
    Scores,
    SuffixDrafter,
)

NEW_TOKENS = 24


def target_logits(context: Sequence[int]) -> torch.Tensor:
    """The target's logits after a context: its last tokens and a slow clock decide."""
    return logits_after(digest(context[-2:]) + len(context) // 20)


@attrs.define(eq=False)
class FakeTarget:
    """Scores by :func:`target_logits`, and checks that it holds what it is said to hold."""

    held: dict[int, int] = attrs.field(factory=dict)

    async def score(self, batch: Sequence[DraftedSequence]) -> Scores:
        await anyio.lowlevel.checkpoint()
        width = 1 + max(len(row.proposal.tokens) for row in batch)
        logits = torch.full((len(batch), width, VOCABULARY), torch.nan)
        hidden = []
        for index, row in enumerate(batch):
            context = row.sequence.verified.tolist()
            tokens = [*context, *row.proposal.tokens]
            assert min(tokens) >= 0
            assert self.held.get(row.sequence.sequence_id, 0) >= row.cached_length
            self.held[row.sequence.sequence_id] = len(tokens)
            states = [target_hidden(tokens, p) for p in range(row.cached_length, len(tokens))]
            hidden.append(torch.stack(states))
            if row.needs_scores:
                for place in range(len(row.proposal.tokens) + 1):
                    logits[index, place] = target_logits(tokens[: len(context) + place])
        return Scores(logits, hidden)

    def roll_back(self, sequence_id: int, length: int) -> None:
        assert length <= self.held[sequence_id]
        self.held[sequence_id] = length

    def free(self, sequence_id: int) -> None:
        self.held.pop(sequence_id, None)


@attrs.define(eq=False)
class Similar(FakeModel):
    """A draft model that is mostly right: it is the target but for a few contexts."""

    async def next_logits(self, rows: Any) -> torch.Tensor:
        await super().next_logits(rows)
        contexts = [self.state[row.sequence_id] for row in rows]
        shifts = [int(digest(context) % 4 == 0) for context in contexts]
        pairs = zip(contexts, shifts, strict=True)
        return torch.stack([target_logits(context).roll(shift) for context, shift in pairs])


DRAFTERS: dict[str, Callable[[], Any]] = {
    "lookup": PromptLookupDrafter,
    "suffix": SuffixDrafter,
    "model": lambda: ModelDrafter(Similar()),
    "hidden-states": lambda: HiddenStateDrafter(FakeLayer()),
    "block": lambda: BlockDrafter(FakeBlock(block_size=3)),
    "first": lambda: FirstDrafter(PromptLookupDrafter(3, 3), ModelDrafter(Similar())),
    "race": lambda: RaceDrafter(SuffixDrafter(), ModelDrafter(Similar())),
}
PROMPTS = [[1, 2, 3, 4, 1, 2], [5], [7, 7, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2], [3, 10]]


def own_tokens(prompt: list[int]) -> tuple[int, ...]:
    context = list(prompt)
    for _ in range(NEW_TOKENS):
        context.append(int(target_logits(context).argmax()))
    return tuple(context[len(prompt) :])


def run_engine(
    drafter: Any, requests: list[Request], backend: str = "asyncio", **settings: Any
) -> tuple[list[tuple[int, ...]], Any]:
    """The tokens of every request, and what the engine counted."""
    found: dict[int, tuple[int, ...]] = {}
    target = FakeTarget()

    async def main() -> Any:
        config = EngineConfig(adaptive=None, **settings)
        async with DraftVerify(target, drafter, config) as engine:
            async with anyio.create_task_group() as group:
                for index, request in enumerate(requests):
                    group.start_soon(serve, engine, index, request)
            return engine.statistics

    async def serve(engine: Any, index: int, request: Request) -> None:
        found[index] = tuple((await engine.complete(request)).tokens)

    statistics = anyio.run(main, backend=backend)
    assert target.held == {}
    return [found[index] for index in range(len(requests))], statistics


ROOMY: dict[str, Any] = {}
TIGHT: dict[str, Any] = {
    "prefill_chunk": 3,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 9,
    "max_cached_tokens": 70,
}


@pytest.mark.parametrize("limits", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("mode", ["lockstep", "pipelined"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_requests_get_the_targets_own_tokens(
    name: str, mode: str, limits: dict[str, Any]
) -> None:
    """Prompts in parts, preemption and drafting ahead included."""
    requests = [Request(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
    for k in (1, 3, 8):
        tokens, statistics = run_engine(
            DRAFTERS[name](), requests, mode=mode, num_speculative_tokens=k, **limits
        )
        assert tokens == [own_tokens(prompt) for prompt in PROMPTS]
        assert statistics.draft_errors == 0


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "race"])
def test_a_seeded_request_repeats_whoever_shares_its_batch(name: str) -> None:
    sampling = [SamplingParameters(temperature=0.8, top_p=0.95, seed=seed) for seed in range(5)]
    requests = [
        Request(prompt, max_new_tokens=NEW_TOKENS, sampling=own)
        for prompt, own in zip(PROMPTS, sampling, strict=True)
    ]
    together, _ = run_engine(DRAFTERS[name](), requests, num_speculative_tokens=3)
    assert len(set(together)) == len(together)
    for request, expected in zip(requests, together, strict=True):
        beside = Request([6, 6, 6], max_new_tokens=9)
        alone, _ = run_engine(DRAFTERS[name](), [beside, request], num_speculative_tokens=3)
        assert alone[1] == expected


@pytest.mark.parametrize("name", ["model", "first", "suffix"])
def test_good_drafts_are_accepted(name: str) -> None:
    """Exactness alone would also hold if every draft were rejected."""
    requests = [Request(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
    _, statistics = run_engine(DRAFTERS[name](), requests, num_speculative_tokens=3)
    assert sum(statistics.accepted) > 10
