from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import (
    ArgumentError,
    Purpose,
    inverse_cdf,
    typical_acceptance_inexact,
    uniforms,
)


def accepted_by_hand(
    tokens: list[int], rows: list[list[float]], count: int, epsilon: float, delta: float
) -> int:
    for place in range(count):
        entropy = -sum(p * math.log(p) for p in rows[place] if p > 0)
        if not rows[place][tokens[place]] > min(epsilon, delta * math.exp(-entropy)):
            return place
    return count


@given(
    st.integers(0, 2**31),
    st.integers(0, 4),
    st.integers(0, 5),
    st.floats(0, 1),
    st.floats(0, 2),
)
def test_accepts_what_is_typical(
    seed: int, batch: int, width: int, epsilon: float, delta: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = (3 * torch.randn(batch, width + 1, 6, generator=generator)).double().softmax(-1)
    tokens = torch.randint(6, (batch, width), generator=generator)
    counts = torch.randint(width + 1, (batch,), generator=generator)
    seeds = torch.arange(batch)
    found = typical_acceptance_inexact(
        tokens, target, num_draft_tokens=counts, epsilon=epsilon, delta=delta, seeds=seeds
    )
    for row in range(batch):
        accepted = accepted_by_hand(
            tokens[row].tolist(), target[row].tolist(), int(counts[row]), epsilon, delta
        )
        number = uniforms(seeds[row : row + 1], torch.tensor([accepted]), Purpose.CHOOSE)
        last = inverse_cdf(target[row, accepted].unsqueeze(0), number)
        emitted = [token for token in found.tokens[row].tolist() if token >= 0]
        assert emitted == [*tokens[row, :accepted].tolist(), int(last)]


def test_name_result_and_documentation_say_that_it_is_not_exact() -> None:
    found = typical_acceptance_inexact(torch.tensor([[0]]), torch.full((1, 2, 2), 0.5))
    assert found.exact is False
    assert "inexact" in typical_acceptance_inexact.__name__
    assert "NOT exact" in str(typical_acceptance_inexact.__doc__)


def test_an_impossible_token_is_never_accepted() -> None:
    target = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    found = typical_acceptance_inexact(torch.tensor([[1]]), target, epsilon=0.0, delta=0.0)
    assert found.tokens.tolist() == [[0, -1]]


@pytest.mark.parametrize(
    ("thresholds", "message"),
    [
        ({"epsilon": 1.5}, r"epsilon: found 1.5, allowed a number in 0..1"),
        ({"epsilon": math.nan}, "epsilon: found nan"),
        ({"delta": -0.1}, "delta: found -0.1, allowed a number >= 0"),
    ],
)
def test_bad_thresholds_are_refused(thresholds: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        typical_acceptance_inexact(torch.tensor([[0]]), torch.full((1, 2, 2), 0.5), **thresholds)


def test_bad_probabilities_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"target_probs\[0, 0\]: found a sum of 2"):
        typical_acceptance_inexact(torch.tensor([[0]]), torch.ones(1, 2, 2))
