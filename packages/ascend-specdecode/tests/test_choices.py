from __future__ import annotations

import bisect
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import ExponentialRace, InverseCdf, inverse_cdf

# More than one block of 256, whole blocks, and a rest.
BOTH = slice(0, 2)
VOCABULARIES = [1, 2, 8, 255, 256, 257, 512, 1000]


def by_bisection(weights: list[float], uniform: float) -> int:
    cumulative = list(itertools.accumulate(weights))
    return bisect.bisect_right(cumulative, uniform * cumulative[-1])


@given(
    st.sampled_from(VOCABULARIES),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=5),
    st.integers(0, 2**31),
)
def test_equals_bisection(vocabulary: int, numbers: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Whole numbers add up without rounding; most tokens have no weight.
    weights = torch.randint(-40, 9, (len(numbers), vocabulary), generator=generator).clamp(min=0)
    weights[:, seed % vocabulary] += 1
    uniforms = torch.tensor(numbers, dtype=torch.float64)
    found = inverse_cdf(weights.float(), uniforms).tolist()
    rows = zip(weights.tolist(), numbers, strict=True)
    assert found == [by_bisection(row, number) for row, number in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_token_without_weight_is_never_chosen(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.rand(400, vocabulary, generator=generator).to(dtype) ** 8
    weights[torch.rand(400, vocabulary, generator=generator) < 0.7] = 0
    weights[:, vocabulary // 2] += 1e-3
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for uniforms in (ends.repeat(200), torch.rand(400, generator=generator).double()):
        chosen = inverse_cdf(weights, uniforms)
        assert bool((weights.gather(1, chosen.unsqueeze(1)) > 0).all())


def test_the_ends_of_the_unit_interval() -> None:
    weights = torch.zeros(2, 600)
    weights[:, 3] = weights[:, 590] = 1
    assert inverse_cdf(weights, torch.tensor([0.0, 1 - 2.0**-53]).double()).tolist() == [3, 590]


def test_rounding_at_the_border_of_blocks_chooses_no_token_without_weight() -> None:
    """(0.2 + 0.1) - 0.1 is more than 0.2: what is left of the number must not become negative."""
    weights = torch.zeros(1, 512, dtype=torch.float64)
    weights[0, 0], weights[0, 257] = 0.2, 0.1
    number = torch.tensor([0.2 / (0.2 + 0.1)], dtype=torch.float64)
    assert float(number * (0.2 + 0.1)) == 0.2
    assert inverse_cdf(weights, number).tolist() == [257]


def test_weights_need_not_sum_to_one_and_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    weights, uniforms = torch.rand(50, 700, generator=generator), torch.rand(50).double()
    copy = weights.clone()
    assert torch.equal(inverse_cdf(weights, uniforms), inverse_cdf(weights * 0.125, uniforms))
    assert torch.equal(weights, copy)


def test_choices_use_the_number_of_the_place() -> None:
    weights = torch.ones(2, 4)
    numbers = torch.tensor([[0.1, 0.3, 0.9], [0.1, 0.3, 0.9]]).double()
    assert InverseCdf(numbers)(weights, torch.tensor([0, 2]), BOTH).tolist() == [0, 3]
    assert InverseCdf(numbers)(weights, torch.tensor([1, 1]), BOTH).tolist() == [1, 1]
    last = InverseCdf(numbers)(weights[:1], torch.tensor([2]), slice(1, 2))
    assert last.tolist() == [3]


def test_a_race_takes_the_largest_quotient() -> None:
    noise = torch.tensor([[1.0, 0.5, 4.0, 0.1]])
    race = ExponentialRace(1 / noise)
    assert race(torch.tensor([[0.2, 0.2, 0.6, 0.0]]), torch.tensor([0]), slice(0, 1)).tolist() == [
        1
    ]
    assert race(
        torch.tensor([[0.1, 0.01, 0.89, 0.0]]), torch.tensor([0]), slice(0, 1)
    ).tolist() == [2]


def test_both_choices_sample_the_same_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([1.0, 2.0, 0.0, 5.0]).expand(40_000, -1)
    uniforms = torch.rand(40_000, generator=generator).double()
    noise = torch.empty(40_000, 4).exponential_(generator=generator)
    for chosen in (
        inverse_cdf(weights, uniforms),
        ExponentialRace(1 / noise)(weights, torch.zeros(40_000).long(), slice(None)),
    ):
        shares = torch.bincount(chosen, minlength=4) / len(chosen)
        torch.testing.assert_close(shares, weights[0] / 8, atol=0.01, rtol=0)
