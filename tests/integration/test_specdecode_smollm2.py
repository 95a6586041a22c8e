"""The draft-verify engine on SmolLM2, our standard backend inside transformers: the same tokens.

What they are compared with is transformers' eager attention on the same weights. Every drafter and
every k in 0..8 in every mode and mix of requests; the whole product is ``specdecode-matrix``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import specdecode_matrix as matrix
import torch
from specdecode_drafters import tree_drafters
from specdecode_runs import argmax_after, generate

from ascend_specdecode import (
    ArgumentError,
    DraftedSequence,
    Drafter,
    DraftVerify,
    ModelDrafter,
    PromptLookupDrafter,
    Scores,
)
from ascend_specdecode.cli import main
from ascend_specdecode.hf import CachedTarget, CausalDraftModel, PagedTarget

NUM_TOKENS = 64
DRAFT_LAYERS = 8  # of 30


@pytest.fixture(scope="module")
def subject(smollm2: Path) -> matrix.Subject:
    return matrix.smollm2_subject(smollm2, NUM_TOKENS)


@pytest.fixture(scope="module")
def reference(subject: matrix.Subject) -> Any:
    return subject.reference


@pytest.fixture(scope="module")
def target(subject: matrix.Subject) -> PagedTarget:
    found = subject.make_target()
    assert isinstance(found, PagedTarget)
    return found


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


def test_plain_decoding_is_the_greedy_output_of_transformers(
    reference: Any, subject: matrix.Subject
) -> None:
    assert [len(tokens) for tokens in subject.plain] == [NUM_TOKENS] * 8
    prompt, tokens = subject.prompts[0], list(subject.plain[0])
    assert argmax_after(reference, prompt, tokens) == tokens
    assert argmax_after(reference, prompt[:-1], tokens) != tokens  # it would notice


# Each mix once and each mode twice; of all requests each has a drafter and k of its own.
BATCHES = list(zip(("lockstep", "pipelined") * 2, matrix.MIXES, strict=True))


def test_every_drafter_meets_every_k(subject: matrix.Subject) -> None:
    both = matrix.repeated(subject, 2)
    batches = [matrix.pairs_of(both, number) for number in range(len(BATCHES))]
    met = {pair for batch in batches for pair in batch}
    assert met == {(name, k) for name in subject.drafters for k in range(9)}
    assert all(len(set(batch)) == len(both.prompts) for batch in batches)


@pytest.mark.parametrize("number", range(len(BATCHES)))
def test_drafts_change_nothing(number: int, subject: matrix.Subject) -> None:
    both = matrix.repeated(subject, 2)
    found = matrix.run_batch(both, number, *BATCHES[number])
    assert found.tokens == both.plain
    assert not found.leaked
    assert found.statistics.draft_errors == 0
    assert found.statistics.acceptance_length > 2  # the drafts are good for something


def test_a_real_draft_model_changes_nothing(reference: Any, subject: matrix.Subject) -> None:
    tokens, counted = generate(
        subject.make_target(), small_draft(reference), subject.prompts[:4], 10,
        num_speculative_tokens=2, mode="pipelined",
    )  # fmt: skip
    assert tokens == [row[:10] for row in subject.plain[:4]]
    assert counted.drafts > 0


def test_trees_change_nothing(reference: Any, subject: matrix.Subject) -> None:
    pairs = zip(subject.prompts, subject.plain, strict=True)
    texts = [[*prompt, *tokens] for prompt, tokens in pairs]
    lengths = [len(prompt) for prompt in subject.prompts]
    target = CachedTarget(reference)
    drafter = tree_drafters(texts, lengths, target.vocabulary_size)["tree of drafts"]()
    tokens, counted = generate(
        target, drafter, subject.prompts, 20, num_speculative_tokens=6, mode="pipelined"
    )
    assert tokens == [row[:20] for row in subject.plain]
    assert counted.draft_errors == 0
    assert counted.acceptance_length > 2
    assert counted.drafted[0] > counted.drafts  # several tokens at the first place


def test_paged_attention_takes_no_trees(target: PagedTarget) -> None:
    drafter = ModelDrafter(CausalDraftModel(target._model), branches=2)
    with pytest.raises(ArgumentError, match="target: found PagedTarget, which takes no trees"):
        DraftVerify(target, drafter)


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
    target: PagedTarget, subject: matrix.Subject
) -> None:
    tokens, _ = generate(
        target,
        PromptLookupDrafter(),
        subject.prompts[5:],
        12,
        verifier=AcceptsOne(),
        num_speculative_tokens=4,
    )
    assert tokens != [row[:12] for row in subject.plain[5:]]


def test_the_command_line_answers_and_says_what_drafts_were_worth(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "run.json"
    asked = ["--chat", "--prompt", "What is the capital of France?", "--max-new-tokens", "16"]
    assert main(["run", str(smollm2), *asked, "--json", "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "Paris" in found["texts"][0]
    assert found["same_as_without_drafts"]
    # The same ratio from what the trace says of both runs.
    plain, drafted = json.loads(trace.read_text())["otherData"]["runs"]
    ratio = plain["seconds"] / plain["tokens"] / (drafted["seconds"] / drafted["tokens"])
    assert found["summary"]["speed_up"] == pytest.approx(ratio, rel=1e-3)
