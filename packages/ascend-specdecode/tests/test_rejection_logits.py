"""Rejection sampling from logits is rejection sampling from their softmax, token for token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import ArgumentError, rejection_sample, rejection_sample_logits
from ascend_specdecode import rejection_logits as module


def step(
    seed: int, batch: int, width: int, size: int, with_probs: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Drafted tokens, logits of which some are -inf, draft probabilities, counts."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, width + 1, size, generator=generator)
    cut = torch.rand(logits.shape, generator=generator) < 0.3
    cut[..., 0] = False
    logits = logits.masked_fill(cut, -math.inf)
    noise = torch.randn(batch, width, size, generator=generator)
    probs = (logits[:, :width].clamp(min=-4) + noise).softmax(-1)
    flat = probs.flatten(0, 1)
    tokens = (
        flat.multinomial(1, generator=generator).reshape(batch, width) if flat.numel() else None
    )
    counts = torch.randint(width + 1, (batch,), generator=generator)
    empty = torch.zeros(batch, width, dtype=torch.int64)
    return empty if tokens is None else tokens, logits, probs if with_probs else None, counts


@pytest.mark.parametrize("entries", [1, 64, 2**19], ids=["row", "rows", "all"])
@given(st.integers(0, 2**31), st.integers(0, 6), st.integers(0, 4), st.booleans())
def test_tokens_are_those_of_the_softmax(
    entries: int, seed: int, batch: int, width: int, with_probs: bool
) -> None:
    tokens, logits, probs, counts = step(seed, batch, width, 23, with_probs)
    given_too = {"num_draft_tokens": counts, "seeds": torch.arange(batch), "positions": counts}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PART_ENTRIES", entries)
        found = rejection_sample_logits(tokens, logits, probs, **given_too)
    assert torch.equal(found, rejection_sample(tokens, logits.softmax(-1), probs, **given_too))


def test_large_batches_accept_and_replace_and_other_logits_give_other_tokens() -> None:
    tokens, logits, probs, _ = step(1, 300, 4, 5000, True)
    seeds = torch.arange(300)
    found = rejection_sample_logits(tokens, logits, probs, seeds=seeds)
    emitted = (found >= 0).sum(dim=1)
    assert emitted.min() == 1
    assert emitted.max() == 5
    assert torch.equal(found, rejection_sample(tokens, logits.softmax(-1), probs, seeds=seeds))
    other = rejection_sample_logits(tokens, 0.9 * logits, probs, seeds=seeds)
    assert not torch.equal(found, other)


def test_what_decides_nothing_may_be_anything() -> None:
    """The first draft cannot be said: the places after it are never looked at."""
    tokens = torch.tensor([[1, 2]])
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 1] = -math.inf
    logits[0, 1:] = math.nan
    found = rejection_sample_logits(tokens, logits, seeds=[3])
    assert found[0, 0] != 1
    assert found[0, 1:].tolist() == [-1, -1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_decide_and_leave_no_token_are_refused(value: float) -> None:
    logits = torch.zeros(2, 1, 4)
    logits[1, 0] = value
    tokens = torch.zeros(2, 0, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"target_logits\[1\]: found NaN, \+inf or only -inf"):
        rejection_sample_logits(tokens, logits, seeds=[1, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_logits": torch.zeros(1, 2, 4)}, r"target_logits: found shape \[1, 2, 4\]"),
        (
            {"target_logits": torch.zeros(1, 3, 4).half()},
            "target_logits.dtype: found torch.float16",
        ),
        ({"draft_tokens": torch.tensor([[1, 4]])}, r"draft_tokens\[0, 1\]: found 4"),
        ({"draft_probs": torch.zeros(1, 2, 4)}, r"draft_probs\[0, 0\]: found a sum of 0"),
        ({"num_draft_tokens": [3]}, r"num_draft_tokens\[0\]: found 3"),
        ({"positions": [-1]}, r"positions\[0\]: found -1"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, object], message: str) -> None:
    arguments = {"draft_tokens": torch.tensor([[1, 2]]), "target_logits": torch.zeros(1, 3, 4)}
    rejection_sample_logits(**arguments)
    with pytest.raises(ArgumentError, match=message):
        rejection_sample_logits(**{**arguments, **change})  # type: ignore[arg-type]
