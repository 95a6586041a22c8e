"""Family (e) of the project's properties: the accepted stream is distributed as the target.

Here for any target and any drafter, with small probabilities and zeros; test_distribution.py does
it at length for twenty settings.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from speculation_support import chi_square_of

from ascend_specdecode import (
    DraftTree,
    Purpose,
    inverse_cdf,
    rejection_sample,
    rejection_sample_tree,
    uniforms,
)

TRIALS = 4000
IMPROBABLE = 1e-9  # in 10,000 examples it does not happen by chance

# Odds of a token, up to 1 : 100, often 0.
odds = st.sampled_from([0, 0, 1, 2, 5, 30, 100])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A target's and a drafter's distribution [V], float64."""
    size = draw(st.integers(1, 6))
    rows = [draw(st.lists(odds, min_size=size, max_size=size).filter(any)) for _ in range(2)]
    weights = torch.tensor(rows, dtype=torch.float64)
    target, drafter = weights / weights.sum(-1, keepdim=True)
    return target, drafter


def sampled(drafter: torch.Tensor, first_seed: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds [TRIALS] and k independent draws of the drafter for each: [TRIALS, k]."""
    seeds = first_seed + torch.arange(TRIALS)
    wide = drafter.expand(TRIALS, -1)
    draws = [
        inverse_cdf(wide, uniforms(seeds, torch.tensor(0), Purpose.DRAFT, place))
        for place in range(k)
    ]
    return seeds, torch.stack(draws, dim=1)


@given(pairs(), st.integers(1, 4), st.booleans(), st.integers(0, 2**40))
def test_family_e_the_first_and_the_last_token_are_the_targets(
    pair: tuple[torch.Tensor, torch.Tensor], k: int, with_probs: bool, first_seed: int
) -> None:
    target, drafter = pair
    seeds, tokens = sampled(drafter, first_seed, k)
    probs = drafter.expand(TRIALS, k, -1) if with_probs else None
    found = rejection_sample(tokens, target.expand(TRIALS, k + 1, -1), probs, seeds=seeds)
    assert chi_square_of(found[:, 0], target) > IMPROBABLE
    bonus = found[:, k][found[:, k] >= 0]
    if len(bonus) > 100:
        assert chi_square_of(bonus, target) > IMPROBABLE


@given(pairs(), st.integers(1, 4), st.booleans(), st.integers(0, 2**40))
def test_family_e_whatever_siblings_a_tree_has(
    pair: tuple[torch.Tensor, torch.Tensor], siblings: int, with_probs: bool, first_seed: int
) -> None:
    target, drafter = pair
    seeds, tokens = sampled(drafter, first_seed, siblings)
    tree = DraftTree(tokens, torch.full_like(tokens, -1), torch.full_like(seeds, siblings))
    probs = drafter.expand(TRIALS, siblings, -1) if with_probs else None
    wide = target.expand(TRIALS, siblings + 1, -1)
    found = rejection_sample_tree(tree, wide, probs, seeds=seeds).tokens
    assert chi_square_of(found[:, 0], target) > IMPROBABLE


def test_another_distribution_is_told_apart() -> None:
    target, drafter = torch.tensor([[0.3, 0.6, 0.1], [0.5, 0.2, 0.3]], dtype=torch.float64)
    seeds, tokens = sampled(drafter, 0, 1)
    wide: Any = target.expand(TRIALS, 2, -1), drafter.expand(TRIALS, 1, -1)
    found = rejection_sample(tokens, *wide, seeds=seeds)[:, 0]
    assert chi_square_of(found, target) > 1e-3
    assert chi_square_of(tokens[:, 0], target) < IMPROBABLE
    assert chi_square_of(found, torch.tensor([0.33, 0.57, 0.1]).double()) < 1e-3


@pytest.mark.parametrize("k", [1, 3])
def test_an_impossible_token_alone_is_enough(k: int) -> None:
    target = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    assert chi_square_of(torch.tensor([1, 2] * 500 + [0] * k), target) == 0
