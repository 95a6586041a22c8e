"""The draft-verify engine on SmolLM2, our standard backend inside transformers: the same tokens.

What they are compared with is transformers' eager attention on the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import prompts
import pytest
import torch
from specdecode_runs import argmax_after, eager_model, generate

from ascend_specdecode import (
    DraftedSequence,
    Drafter,
    ModelDrafter,
    PromptLookupDrafter,
    RaceDrafter,
    Scores,
    SuffixDrafter,
)
from ascend_specdecode.hf import CausalDraftModel, PagedTarget, load_model, load_target

NUM_TOKENS = 64
DRAFT_LAYERS = 8  # of 30


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return eager_model(smollm2)


@pytest.fixture(scope="module")
def target(smollm2: Path) -> PagedTarget:
    found = load_target(load_model(smollm2))
    assert isinstance(found, PagedTarget)
    return found


@pytest.fixture(scope="module")
def texts(smollm2: Path) -> list[list[int]]:
    """Eight prompts; two of them ask for a repetition, which lookup drafters can guess."""
    return [*prompts.batch(smollm2)[:6], *prompts.rewrite(smollm2)[:2]]


@pytest.fixture(scope="module")
def plain(target: PagedTarget, texts: list[list[int]]) -> list[list[int]]:
    return generate(target, None, texts, NUM_TOKENS, num_speculative_tokens=0)[0]


def small_draft(reference: Any) -> Drafter:
    """The first layers of the model with its own head."""
    draft = copy.copy(reference)
    draft._modules = dict(reference._modules)
    draft.model = copy.copy(reference.model)
    draft.model._modules = dict(reference.model._modules)
    draft.model.layers = torch.nn.ModuleList(reference.model.layers[:DRAFT_LAYERS])
    draft.config = copy.deepcopy(reference.config)
    draft.model.config = draft.config
    draft.config.num_hidden_layers = DRAFT_LAYERS
    return ModelDrafter(CausalDraftModel(draft))


# Drafter, k, mode, tokens: few of them with the draft model, which is slow and guesses little.
RUNS: dict[str, tuple[Callable[[Any], Drafter], int, str, int]] = {
    "n-gram": (lambda _: PromptLookupDrafter(), 4, "lockstep", NUM_TOKENS),
    "suffix": (lambda _: SuffixDrafter(), 8, "pipelined", NUM_TOKENS),
    "model": (small_draft, 2, "lockstep", 12),
    "race": (lambda _: RaceDrafter(PromptLookupDrafter(), SuffixDrafter()), 5, "pipelined", 32),
}


def test_plain_decoding_is_the_greedy_output_of_transformers(
    reference: Any, texts: list[list[int]], plain: list[list[int]]
) -> None:
    for prompt, tokens in zip(texts, plain, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert argmax_after(reference, prompt, tokens) == tokens


@pytest.mark.parametrize("name", RUNS)
def test_drafts_change_nothing(
    name: str,
    target: PagedTarget,
    reference: Any,
    texts: list[list[int]],
    plain: list[list[int]],
) -> None:
    make, k, mode, count = RUNS[name]
    tokens, counted = generate(
        target, make(reference), texts, count, num_speculative_tokens=k, mode=mode
    )
    assert tokens == [row[:count] for row in plain]
    assert counted.drafts > 0
    assert not target.cache.sequences
    if name in ("n-gram", "suffix"):
        assert counted.acceptance_length > 1.3  # the repetitions were guessed


class AcceptsOne:
    """Broken on purpose: takes the first draft without looking."""

    async def verify(
        self, batch: Sequence[DraftedSequence], scores: Scores
    ) -> Sequence[Sequence[int]]:
        rows = []
        for row, logits in zip(batch, scores.logits, strict=True):
            taken = row.proposal.tokens[: 1 if row.needs_scores else 0]
            rows.append([*taken, int(logits[len(taken)].argmax())] if row.needs_scores else [])
        return rows


def test_control_a_verifier_that_does_not_look_changes_the_output(
    target: PagedTarget, texts: list[list[int]], plain: list[list[int]]
) -> None:
    tokens, _ = generate(
        target,
        PromptLookupDrafter(),
        texts[:3],
        12,
        verifier=AcceptsOne(),
        num_speculative_tokens=4,
    )
    assert tokens != [row[:12] for row in plain[:3]]
