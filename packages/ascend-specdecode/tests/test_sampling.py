from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import (
    GREEDY,
    ArgumentError,
    DraftedSequence,
    GreedySampler,
    LogitsSampler,
    Proposal,
    SamplingParameters,
    SequenceState,
    apply_logit_bias,
    apply_top_k,
    apply_top_p,
    shaped_probabilities,
)

VOCABULARY = 7

# Multiples of 1/4, so that equal logits are common.
logits = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=12)


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


@given(logits, st.integers(0, 14))
def test_top_k_keeps_the_largest_and_their_equals(values: list[float], k: int) -> None:
    least = sorted(values, reverse=True)[k - 1] if 0 < k < len(values) else -math.inf
    expected = [value if value >= least else -math.inf for value in values]
    assert apply_top_k(rows(values), [k])[0, 0].tolist() == expected


def nucleus(values: list[float], p: float) -> set[int]:
    """The tokens that top-p keeps: most likely first, of equals the highest id first.

    ``p`` must not be a sum of few equal probabilities: rounding would then decide.
    """
    order = sorted(range(len(values)), key=lambda token: (values[token], token), reverse=True)
    total = sum(math.exp(value) for value in values)
    kept: set[int] = set()
    mass = 0.0
    for token in order:
        if kept and mass >= p - 1e-6:
            break
        kept.add(token)
        mass += math.exp(values[token]) / total
    return kept


@given(logits, st.sampled_from([1e-9, 0.0137, 0.107, 0.317, 0.513, 0.713, 0.897, 0.9987, 1.0]))
def test_top_p_keeps_the_smallest_set_of_that_probability(values: list[float], p: float) -> None:
    kept = nucleus(values, p) if p < 1 else set(range(len(values)))
    found = apply_top_p(rows(values), [p])[0, 0].tolist()
    assert found == [value if token in kept else -math.inf for token, value in enumerate(values)]


@given(
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.integers(1, 3),
    st.lists(st.sampled_from([0, 1, 3, 20, 90]), min_size=5, max_size=5),
    st.lists(st.sampled_from([0.317, 0.897, 1.0]), min_size=5, max_size=5),
)
def test_after_top_k_sorting_less_gives_the_same(
    seed: int, batch: int, width: int, top_k: list[int], top_p: list[float]
) -> None:
    """Top-p sorts only what top-k left; rows of a batch do not mix."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (batch, width, 90), generator=generator) / 2
    limits = [1.0] * batch, top_k[:batch], top_p[:batch]
    found = shaped_probabilities(values, *limits)
    for row in range(batch):
        cut = apply_top_k(values[[row]], [top_k[row]])
        for place in range(width):
            kept = nucleus(cut[0, place].tolist(), top_p[row])
            if top_p[row] == 1:
                kept = set(cut[0, place].isfinite().nonzero().flatten().tolist())
            assert set(found[row, place].nonzero().flatten().tolist()) == kept
    torch.testing.assert_close(found.sum(-1), torch.ones(batch, width))


@pytest.mark.parametrize("temperature", [1e-38, 1e-8, 0.1, 1.0, 100.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    values = [3.0, -2.0, 2.5, 3.0]
    weights = [math.exp((value - 3) / temperature) for value in values]
    expected = torch.tensor([weight / sum(weights) for weight in weights])
    found = shaped_probabilities(rows(values), [temperature], [0], [1.0])
    torch.testing.assert_close(found[0, 0], expected)


def row_of(
    prompt: list[int], output: list[int], drafted: list[int], **sampling: Any
) -> DraftedSequence:
    parameters = SamplingParameters(**sampling)
    sequence = SequenceState.of([*prompt, *output], 0, parameters, prompt_length=len(prompt))
    return DraftedSequence(sequence, Proposal(tuple(drafted)))


def adjusted_by_hand(
    values: list[float], prompt: list[int], output: list[int], parameters: SamplingParameters
) -> list[float]:
    found = []
    for token, value in enumerate(values):
        value += parameters.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            factor = parameters.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= parameters.frequency_penalty * output.count(token)
        value -= parameters.presence_penalty * (token in output)
        found.append(value)
    return found


tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=5)
penalties = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.25]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.75]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCABULARY - 1), st.sampled_from([-2.0, 0.5, -math.inf]), max_size=3
        ),
    }
)


@given(
    st.lists(st.tuples(tokens.filter(bool), tokens, tokens, penalties), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_bias_and_penalties_see_the_drafted_tokens_before_a_place(
    cases: list[tuple[list[int], list[int], list[int], dict[str, Any]]], seed: int
) -> None:
    batch = [row_of(*case[:3], **case[3]) for case in cases]
    width = 1 + max(len(row.proposal.tokens) for row in batch)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(batch), width, VOCABULARY, generator=generator)
    copy = values.clone()
    found = LogitsSampler().adjusted(batch, values)
    assert torch.equal(values, copy)
    for row, (prompt, output, drafted, _) in enumerate(cases):
        for place in range(len(drafted) + 1):
            expected = adjusted_by_hand(
                values[row, place].tolist(),
                prompt,
                output + drafted[:place],
                batch[row].sequence.sampling,
            )
            torch.testing.assert_close(found[row, place], torch.tensor(expected))


def test_penalties_without_the_drafted_tokens_are_told_apart() -> None:
    row = row_of([1], [2], [3, 3], frequency_penalty=1.0)
    found = LogitsSampler().adjusted([row], torch.zeros(1, 3, VOCABULARY))
    assert found[0, :, 3].tolist() == [0, -1, -2]
    assert found[0, :, 2].tolist() == [-1, -1, -1]
    assert found[0, :, 1].tolist() == [0, 0, 0]  # the prompt does not count


def test_tokens_beyond_the_vocabulary_are_not_counted() -> None:
    """A target's embedding may be larger than its head."""
    row = row_of([1, VOCABULARY + 5], [2], [], repetition_penalty=2.0)
    found = LogitsSampler().adjusted([row], torch.ones(1, 1, VOCABULARY))
    assert found[0, 0].tolist() == [1, 0.5, 0.5, 1, 1, 1, 1]


def test_greedy_rows_have_one_token_and_beside_others_nothing_changes() -> None:
    greedy = row_of([1], [], [2], logit_bias={4: 9.0})
    sampled = row_of([1], [], [2], temperature=0.5, top_k=3, top_p=0.8)
    values = torch.randn(2, 2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    found = LogitsSampler().probabilities([greedy, sampled], values)
    assert found[0].tolist() == [[0, 0, 0, 0, 1, 0, 0]] * 2
    torch.testing.assert_close(found[1], shaped_probabilities(values[1:], [0.5], [3], [0.8])[0])
    assert torch.equal(found[[1]], LogitsSampler().probabilities([sampled], values[[1]]))


def test_the_most_likely_token_is_the_first_of_equals() -> None:
    sampler = LogitsSampler()
    assert isinstance(sampler, GreedySampler)
    batch = [row_of([1], [], [])]
    assert sampler.most_likely(batch, torch.tensor([[[0.0, 2.0, 2.0]]])).tolist() == [[1]]
    assert sampler.probabilities(batch, torch.tensor([[[0.0, 2.0, 2.0]]])).tolist() == [[[0, 1, 0]]]


@pytest.mark.parametrize(
    "bad", [[math.nan, 0.0], [-math.inf, -math.inf], [0.0, math.nan], [math.inf, 0.0]]
)
def test_an_impossible_row_has_no_most_likely_token(bad: list[float]) -> None:
    batch, values = [row_of([1], [], []), row_of([1], [], [])], torch.tensor([[bad], [[0.0, 1.0]]])
    assert LogitsSampler().most_likely(batch, values).tolist() == [[-1], [1]]
    found = LogitsSampler().probabilities(batch, values)
    assert bool(found[0].isnan().all())
    assert found[1].tolist() == [[0, 1]]


def test_low_precision_logits_are_sampled_in_float32() -> None:
    row = row_of([1], [], [], temperature=0.7, top_p=0.9, repetition_penalty=1.1)
    values = torch.randn(1, 1, VOCABULARY, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = LogitsSampler().probabilities([row], values)
    assert found.dtype == torch.float32
    assert torch.equal(found, LogitsSampler().probabilities([row], values.float()))


def test_a_subclass_may_forbid_tokens() -> None:
    class EvenOnly(LogitsSampler):
        def adjusted(self, batch: Any, logits: torch.Tensor) -> torch.Tensor:
            odd = torch.arange(logits.shape[-1]) % 2 == 1
            return super().adjusted(batch, logits).masked_fill(odd, -math.inf)

    batch = [row_of([1], [], []), row_of([1], [], [], temperature=1.0)]
    values = torch.tensor([0.0, 5.0, 1.0, 9.0]).expand(2, 1, 4)
    assert EvenOnly().most_likely(batch, values).tolist() == [[2], [2]]
    assert (EvenOnly().probabilities(batch, values)[:, 0, 1::2] == 0).all()


def test_bad_input_is_refused() -> None:
    batch = [row_of([1], [], [])]
    with pytest.raises(ArgumentError, match=r"logits: found shape \[2, 1, 7\]"):
        LogitsSampler().probabilities(batch, torch.zeros(2, 1, VOCABULARY))
    biased = [row_of([1], [], [], logit_bias={VOCABULARY: 1.0})]
    with pytest.raises(ArgumentError, match=r"logit_bias: found token 7, .*below V = 7"):
        LogitsSampler().probabilities(biased, torch.zeros(1, 1, VOCABULARY))
    with pytest.raises(ArgumentError, match="logit_bias: found token 9"):
        apply_logit_bias(torch.zeros(2, 1, 5), [{1: 2.0}, {9: 1.0}])


def test_nothing_to_do_copies_nothing() -> None:
    values = torch.zeros(2, 1, 5)
    assert apply_top_k(values, [0, 5]) is values
    assert apply_top_p(values, [1.0, 1.0]) is values
    row = DraftedSequence(SequenceState.of([1], 0, GREEDY))
    assert LogitsSampler().adjusted([row, row], values) is values
