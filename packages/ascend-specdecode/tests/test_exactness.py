"""Drafting and verifying gives the target's own greedy stream, whatever was drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import PAD_TOKEN, NgramDrafter, verify_greedy

VOCABULARY = 5
MOST = 4
Propose = Callable[[list[int]], list[int]]
Verify = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def target(context: Sequence[int]) -> int:
    """A deterministic next token that depends on the last three tokens and the length."""
    mixed = 7 * context[-1] + 3 * sum(context[-3:]) + len(context) // 6
    return mixed % VOCABULARY


def own_stream(prompt: list[int], new_tokens: int) -> list[int]:
    context = list(prompt)
    for _ in range(new_tokens):
        context.append(target(context))
    return context[len(prompt) :]


def score(contexts: list[list[int]], drafts: list[list[int]]) -> torch.Tensor:
    """The target's choice after every drafted prefix, padded: [B, MOST+1]."""
    rows = torch.zeros(len(contexts), MOST + 1, dtype=torch.int64)
    for row, (context, draft) in enumerate(zip(contexts, drafts, strict=True)):
        for position in range(len(draft) + 1):
            rows[row, position] = target(context + draft[:position])
    return rows


def speculative_streams(
    prompts: list[list[int]], new_tokens: int, propose: Propose, verify: Verify
) -> list[list[int]]:
    contexts = [list(prompt) for prompt in prompts]
    for _ in range(new_tokens):  # every step emits at least one token per request
        drafts = [propose(context)[:MOST] for context in contexts]
        padded = torch.tensor([draft + [0] * (MOST - len(draft)) for draft in drafts])
        counts = torch.tensor([len(draft) for draft in drafts])
        tokens = verify(padded, score(contexts, drafts), counts)
        for context, row in zip(contexts, tokens.tolist(), strict=True):
            context.extend(token for token in row if token != PAD_TOKEN)
    pairs = zip(contexts, prompts, strict=True)
    return [context[len(prompt) :][:new_tokens] for context, prompt in pairs]


prompt_batches = st.lists(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12), min_size=1, max_size=4
)


@given(prompt_batches, st.data())
def test_any_drafter_leaves_the_stream_unchanged(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    drafts = st.lists(st.integers(0, VOCABULARY - 1), max_size=MOST)

    def propose(context: list[int]) -> list[int]:
        right = own_stream(context, MOST)
        # Mostly right, so that long prefixes are accepted and rejected late.
        keep = data.draw(st.integers(0, MOST))
        return (right[:keep] + data.draw(drafts))[:MOST]

    streams = speculative_streams(prompts, 8, propose, verify_greedy)
    assert streams == [own_stream(prompt, 8) for prompt in prompts]


@given(prompt_batches, st.integers(1, 3), st.integers(0, 2), st.integers(0, MOST))
def test_ngram_drafter_leaves_the_stream_unchanged(
    prompts: list[list[int]], min_n: int, more: int, k: int
) -> None:
    drafter = NgramDrafter(min_n, min_n + more, k)
    streams = speculative_streams(prompts, 24, drafter.propose, verify_greedy)
    assert streams == [own_stream(prompt, 24) for prompt in prompts]


def test_right_drafts_are_accepted_in_full() -> None:
    """Exactness alone would also hold for a verifier that accepts nothing."""
    context = [1, 2, 3]
    draft = own_stream(context, MOST)
    tokens = verify_greedy(torch.tensor([draft]), score([context], [draft]), torch.tensor([MOST]))
    assert tokens.tolist() == [own_stream(context, MOST + 1)]


def accept_one_wrong_draft(
    draft: torch.Tensor, choices: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """A broken verifier: keeps the first drafted token without looking."""
    tokens = verify_greedy(draft, choices, counts)
    tokens[:, 0] = torch.where(counts > 0, draft[:, 0], tokens[:, 0])
    return tokens


def forget_the_last_token(
    draft: torch.Tensor, choices: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """A broken verifier: loses the bonus or recovered token when something was accepted."""
    tokens = verify_greedy(draft, choices, counts)
    emitted = (tokens != PAD_TOKEN).sum(dim=1)
    last = torch.arange(tokens.shape[1]) == (emitted - 1).unsqueeze(1)
    wide_draft = torch.nn.functional.pad(draft, (0, 1))
    return torch.where(last & (emitted > 1).unsqueeze(1), wide_draft, tokens)


@pytest.mark.parametrize("broken", [accept_one_wrong_draft, forget_the_last_token])
def test_a_broken_verifier_is_seen(broken: Verify) -> None:
    def half_right(context: list[int]) -> list[int]:
        right = own_stream(context, 2)
        wrong = (right[1] + 1) % VOCABULARY
        return [right[0], wrong] if len(context) % 2 else [wrong, wrong]

    prompts = [[1, 2, 3], [4, 0]]
    expected = [own_stream(prompt, 12) for prompt in prompts]
    assert speculative_streams(prompts, 12, half_right, verify_greedy) == expected
    assert speculative_streams(prompts, 12, half_right, broken) != expected
