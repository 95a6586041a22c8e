from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from speculation_support import (
    START,
    WATCHED,
    chi_square,
    draft,
    joint,
    tables,
)

from ascend_specdecode import (
    GREEDY,
    ArgumentError,
    DraftedSequence,
    DrafterError,
    ExactVerifier,
    InexactTypicalVerifier,
    LogitsSampler,
    Proposal,
    SamplingParameters,
    Scores,
    SequenceState,
    TargetError,
    Verifier,
    rejection_sample,
    typical_acceptance_inexact,
    verify_greedy,
)

SIZE = 9
SAMPLED = SamplingParameters(temperature=0.8, top_k=6, top_p=0.9, frequency_penalty=0.5)


def random_batch(
    seed: int, kinds: Sequence[str], width: int
) -> tuple[list[DraftedSequence], torch.Tensor]:
    """Rows of the given kinds with their own number of drafted tokens, and logits for them."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for index, kind in enumerate(kinds):
        count = int(torch.randint(width + 1, (), generator=generator))
        probs = torch.randn(count, SIZE, generator=generator).softmax(-1)
        tokens = probs.multinomial(1, generator=generator).flatten() if count else torch.zeros(0)
        sampling = GREEDY if kind == "greedy" else SAMPLED
        length = 2 + int(torch.randint(5, (), generator=generator))
        context = torch.randint(SIZE, (length,), generator=generator).tolist()
        sequence = SequenceState.of(context, index, sampling, seed=seed + index, prompt_length=1)
        proposal = Proposal(
            tuple(int(token) for token in tokens), probs if kind == "with-probs" else None
        )
        batch.append(DraftedSequence(sequence, proposal, needs_scores=kind != "prompt"))
    return batch, torch.randn(len(batch), width + 1, SIZE, generator=generator)


def one_by_one(row: DraftedSequence, logits: torch.Tensor) -> tuple[int, ...]:
    """The functions that the verifier is made of, called for one row."""
    if not row.needs_scores:
        return ()
    tokens = torch.tensor([row.proposal.tokens], dtype=torch.int64).reshape(1, -1)
    logits = logits[: tokens.shape[1] + 1].unsqueeze(0)
    if row.sequence.sampling.greedy:
        found = verify_greedy(tokens, logits.argmax(-1), torch.tensor([tokens.shape[1]]))
    else:
        probs = row.proposal.probabilities
        found = rejection_sample(
            tokens,
            LogitsSampler().probabilities([row], logits),
            None if probs is None else probs.unsqueeze(0),
            seeds=torch.tensor([row.sequence.seed]),
            positions=torch.tensor([len(row.sequence)]),
        )
    return tuple(token for token in found[0].tolist() if token >= 0)


kinds = st.lists(st.sampled_from(["greedy", "with-probs", "without", "prompt"]), max_size=6)


@given(st.integers(0, 2**31), kinds, st.integers(0, 5))
def test_every_row_is_verified_as_if_it_were_alone(seed: int, kinds: list[str], width: int) -> None:
    batch, logits = random_batch(seed, kinds, width)
    verifier: Verifier[Scores] = ExactVerifier()
    emitted = asyncio.run(verifier.verify(batch, Scores(logits)))
    expected = [one_by_one(row, own) for row, own in zip(batch, logits, strict=True)]
    assert [tuple(row) for row in emitted] == expected


@given(st.integers(0, 2**31), kinds, st.integers(0, 5))
def test_a_sampler_without_names_for_greedy_tokens_gives_the_same(
    seed: int, kinds: list[str], width: int
) -> None:
    class Plain:
        def probabilities(self, batch: Any, logits: torch.Tensor) -> torch.Tensor:
            return LogitsSampler().probabilities(batch, logits)

    batch, logits = random_batch(seed, kinds, width)
    found = ExactVerifier(Plain()).verify_logits(batch, logits)
    assert found == ExactVerifier().verify_logits(batch, logits)


def test_stream_of_a_verified_sequence_has_the_targets_distribution() -> None:
    """From logits through the verifier, step after step, for requests of one batch."""
    target, drafter = tables()
    sampling = SamplingParameters(temperature=0.7)
    verifier, trials = ExactVerifier(), 3000
    streams = torch.full((trials, WATCHED), -1)
    for first in range(0, trials, 500):
        seeds = range(first, first + 500)
        states = [SequenceState.of([START], seed, sampling, seed=seed) for seed in seeds]
        while min(len(state) for state in states) <= WATCHED:
            states = next_states(verifier, states, target, drafter)
        for row, state in zip(seeds, states, strict=True):
            streams[row] = torch.from_numpy(state.verified[1 : 1 + WATCHED].copy())
    expected = joint((target.double() / 0.7).softmax(-1))
    assert chi_square(streams, expected) > 1e-4
    assert chi_square(streams, joint(target.double().softmax(-1))) < 1e-8  # control


def next_states(
    verifier: ExactVerifier,
    states: list[SequenceState],
    target: torch.Tensor,
    drafter: torch.Tensor,
) -> list[SequenceState]:
    last = torch.tensor([int(state.verified[-1]) for state in states])
    seeds = torch.tensor([state.seed for state in states])
    positions = torch.tensor([len(state) for state in states])
    tokens, probs = draft(drafter.softmax(-1), last, seeds, positions, 3)
    proposals = [Proposal(tuple(row), own) for row, own in zip(tokens.tolist(), probs, strict=True)]
    batch = [DraftedSequence(*pair) for pair in zip(states, proposals, strict=True)]
    context = torch.cat([last.unsqueeze(1), tokens], dim=1)
    grown = []
    for state, emitted in zip(states, verifier.verify_logits(batch, target[context]), strict=True):
        state.origin.buffer.append(emitted)
        grown.append(SequenceState(state.origin, state.length + len(emitted)))
    return grown


@given(st.integers(0, 2**31), st.integers(0, 5))
def test_the_inexact_verifier_says_so_and_is_typical_acceptance(seed: int, width: int) -> None:
    batch, logits = random_batch(seed, ["without", "prompt", "with-probs", "greedy"], width)
    emitted = asyncio.run(InexactTypicalVerifier(delta=0.5).verify(batch, Scores(logits)))
    assert ExactVerifier.exact
    assert not InexactTypicalVerifier.exact
    assert emitted[1] == ()
    for row in (0, 2, 3):
        one = [batch[row]]
        tokens = torch.tensor([one[0].proposal.tokens], dtype=torch.int64).reshape(1, -1)
        found = typical_acceptance_inexact(
            tokens,
            LogitsSampler().probabilities(one, logits[[row], : tokens.shape[1] + 1]),
            delta=0.5,
            seeds=torch.tensor([one[0].sequence.seed]),
            positions=torch.tensor([len(one[0].sequence)]),
        )
        assert list(emitted[row]) == [token for token in found.tokens[0].tolist() if token >= 0]


def test_nothing_to_verify_emits_nothing() -> None:
    batch, logits = random_batch(0, ["prompt", "prompt"], 0)
    for verifier in (ExactVerifier(), InexactTypicalVerifier()):
        assert asyncio.run(verifier.verify(batch, Scores(logits))) == [(), ()]


def row_of(tokens: tuple[int, ...], sampling: SamplingParameters, **more: Any) -> DraftedSequence:
    return DraftedSequence(SequenceState.of([1, 2], 17, sampling), Proposal(tokens, **more))


NAN = torch.zeros(1, 2, 4)
NAN[0, 1, 2] = math.nan
IMPOSSIBLE = torch.full((1, 2, 4), -math.inf)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("proposal", "logits", "error", "message"),
    [
        ((1,), torch.zeros(2, 4), ArgumentError, r"logits: .* allowed shape \[B, K\+1, V\]"),
        ((1,), torch.zeros(2, 2, 4), ArgumentError, r"logits: .* with B = 1 and K >= 1"),
        ((1, 2), torch.zeros(1, 2, 4), ArgumentError, r"logits: .* with B = 1 and K >= 2"),
        ((4,), torch.zeros(1, 2, 4), DrafterError, r"sequence 17: found tokens \[4\], .*V = 4"),
        ((-1,), torch.zeros(1, 2, 4), DrafterError, r"sequence 17: found tokens \[-1\]"),
        ((1,), NAN, TargetError, "no token is possible: .* for sequence 17 at place 1"),
        ((1,), IMPOSSIBLE, TargetError, "no token is possible: .* for sequence 17 at place 0"),
    ],
)
def test_bad_scores_and_drafts_are_refused(
    sampling: SamplingParameters,
    proposal: tuple[int, ...],
    logits: torch.Tensor,
    error: type[Exception],
    message: str,
) -> None:
    for verifier in (ExactVerifier(), InexactTypicalVerifier()):
        with pytest.raises(error, match=message):
            asyncio.run(verifier.verify([row_of(proposal, sampling)], Scores(logits)))


def wrong_row(place: int, value: float) -> torch.Tensor:
    """Two distributions over four tokens, one entry of which is changed."""
    probs = torch.full((2, 4), 0.25)
    probs[place, 3] = value
    return probs


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        (torch.full((2, 5), 0.2), r"found probabilities of shape \[2, 5\], allowed .* \[2, 4\]"),
        (torch.full((1, 4), 0.25), r"found probabilities of shape \[1, 4\]"),
        (torch.ones(2, 4, dtype=torch.int64), "found probabilities of torch.int64"),
        (wrong_row(1, math.nan), "the probabilities of drafted token 1 are no distribution"),
        (wrong_row(0, -0.25), "the probabilities of drafted token 0 are no distribution"),
        (wrong_row(1, 0.5), "the probabilities of drafted token 1 are no distribution"),
        (wrong_row(0, math.inf), "the probabilities of drafted token 0 are no distribution"),
    ],
)
def test_probabilities_that_are_none_are_held_against_the_drafter(
    probabilities: torch.Tensor, message: str
) -> None:
    good = attrs.evolve(row_of((1, 2), SAMPLED), sequence=SequenceState.of([5], 3, SAMPLED))
    bad = row_of((1, 2), SAMPLED, probabilities=probabilities)
    with pytest.raises(DrafterError, match=f"drafted for sequence 17: {message}") as caught:
        ExactVerifier().verify_logits([good, bad], torch.zeros(2, 3, 4))
    assert caught.value.sequence_ids == {17}


def test_an_error_names_all_rows_of_its_kind_and_no_other() -> None:
    logits = torch.zeros(4, 2, 4)
    logits[1, 0, 2] = logits[3, 1, 0] = math.nan
    samplings = (GREEDY, GREEDY, SAMPLED, SAMPLED)
    rows = [
        DraftedSequence(SequenceState.of([1], number, sampling), Proposal((1,)))
        for number, sampling in enumerate(samplings)
    ]
    with pytest.raises(TargetError) as caught:
        ExactVerifier().verify_logits(rows, logits)
    assert caught.value.sequence_ids == {1, 3}


def test_a_bias_beyond_the_vocabulary_names_its_row() -> None:
    biased = DraftedSequence(SequenceState.of([1], 7, SamplingParameters(logit_bias={4: 1.0})))
    with pytest.raises(
        TargetError, match=r"logit_bias: found tokens \[4\], allowed 0..3"
    ) as caught:
        ExactVerifier().verify_logits([row_of((), GREEDY), biased], torch.zeros(2, 1, 4))
    assert caught.value.sequence_ids == {7}


def test_a_sampler_that_returns_no_distribution_is_seen() -> None:
    class Doubled(LogitsSampler):
        def probabilities(self, batch: Any, logits: torch.Tensor) -> torch.Tensor:
            return 2 * super().probabilities(batch, logits)

    with pytest.raises(TargetError, match="the sampler returned no distribution, for sequence 17"):
        ExactVerifier(Doubled()).verify_logits([row_of((1,), SAMPLED)], torch.zeros(1, 2, 4))


def test_typical_acceptance_refuses_trees() -> None:
    row = row_of((1, 2), SAMPLED, parents=(-1, -1))
    with pytest.raises(ArgumentError, match="found a tree, allowed a chain"):
        asyncio.run(InexactTypicalVerifier().verify([row], Scores(torch.zeros(1, 3, 4))))
