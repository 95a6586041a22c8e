from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from drafter_support import (
    VOCABULARY,
    FakeBlock,
    FakeLayer,
    FakeModel,
    Writer,
    digest,
    layer_alone,
    logits_after,
    pair_number,
    run,
    show,
    target_hidden,
)
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import (
    ArgumentError,
    BlockDrafter,
    DraftDraws,
    DrafterError,
    DraftInput,
    HiddenStateDrafter,
    ModelDrafter,
    Proposal,
    Purpose,
    SamplingParameters,
    Scores,
    SequenceState,
    inverse_cdf,
    shaped_probabilities,
    uniforms,
)

SAMPLED = SamplingParameters(temperature=0.8, top_k=7, top_p=0.9)
tokens = st.integers(0, VOCABULARY - 1)
prompts = st.lists(tokens, min_size=2, max_size=6)


def greedy_drafts(model: FakeModel, context: list[int], k: int) -> list[int]:
    drafted: list[int] = []
    for _ in range(k):
        drafted.append(int(model.alone(context + drafted).argmax()))
    return drafted


def sampled_drafts(
    model: FakeModel, state: SequenceState, k: int
) -> tuple[list[int], list[torch.Tensor]]:
    drafted: list[int] = []
    rows = []
    for place in range(k):
        context = [*state.tokens.tolist(), *drafted]
        given_to = [state.sampling.temperature], [state.sampling.top_k], [state.sampling.top_p]
        row = shaped_probabilities(model.alone(context).reshape(1, 1, -1), *given_to)[0]
        seed, position = torch.tensor([state.seed]), torch.tensor([len(state) + place])
        drafted.append(int(inverse_cdf(row, uniforms(seed, position, Purpose.DRAFT))))
        rows.append(row[0])
    return drafted, rows


@attrs.frozen
class Step:
    """What happens between two proposals."""

    k: int
    accepted: int  # of the drafted tokens, at most
    last: int
    ahead: tuple[int, ...]  # assumed for a call of its own before verification
    interrupted: bool


steps = st.lists(
    st.builds(
        Step,
        st.integers(1, 4),
        st.integers(0, 4),
        tokens,
        st.lists(tokens, max_size=3).map(tuple),
        st.booleans(),
    ),
    max_size=6,
)


def interrupted(model: Any, drafter: Any, state: SequenceState) -> None:
    """A call that is cancelled after the model wrote its state."""
    model.interrupt = True
    with pytest.raises(InterruptedError):
        run(drafter.propose, [state], 3)


@given(prompts, steps)
def test_a_draft_model_drafts_as_if_it_had_no_state(prompt: list[int], steps: list[Step]) -> None:
    """Accepted, rejected, assumed and interrupted drafts leave no trace in what is computed."""
    model = FakeModel()
    drafter = ModelDrafter(model)
    writer = Writer.start(prompt)
    for step in steps:
        if step.interrupted:
            interrupted(model, drafter, writer.state)
        (proposal,) = run(drafter.propose, [writer.state], step.k)
        assert list(proposal.tokens) == greedy_drafts(model, writer.tokens, step.k)
        assert proposal.probabilities is None
        ahead = writer.state.assume(step.ahead)
        (found,) = run(drafter.propose, [ahead], 2)
        assert list(found.tokens) == greedy_drafts(model, [*writer.tokens, *step.ahead], 2)
        if step.interrupted:  # while drafting ahead of something else
            interrupted(model, drafter, writer.state.assume([step.last, step.last]))
            (found,) = run(drafter.propose, [ahead], 2)
            assert list(found.tokens) == greedy_drafts(model, [*writer.tokens, *step.ahead], 2)
        writer.step(proposal, [*proposal.tokens[: step.accepted], step.last])


@given(prompts, st.integers(1, 4), st.integers(0, 4))
def test_only_what_is_new_is_computed(prompt: list[int], k: int, accepted: int) -> None:
    model = FakeModel()
    drafter, writer = ModelDrafter(model), Writer.start(prompt)
    (proposal,) = run(drafter.propose, [writer.state], k)
    assert [len(row.tokens) for (row,) in model.inputs] == [len(prompt), *[1] * (k - 1)]
    model.inputs.clear()
    accepted = min(accepted, k)
    writer.step(proposal, [*proposal.tokens[:accepted], 1])
    run(drafter.propose, [writer.state], 1)
    ((row,),) = model.inputs
    # The last drafted token was never computed; the state of other accepted ones is used.
    computed = len(prompt) + min(accepted, k - 1)
    rejected_was_the_same = accepted < k - 1 and proposal.tokens[accepted] == 1
    assert row.start == min(computed + rejected_was_the_same, len(writer.tokens) - 1)
    assert row.end == len(writer.tokens)


@given(st.lists(prompts, min_size=1, max_size=4), st.integers(1, 4))
def test_sequences_of_a_batch_do_not_mix(batch: list[list[int]], k: int) -> None:
    model = FakeModel()
    states = [
        Writer.start(prompt, number, SAMPLED if number % 2 else SamplingParameters()).state
        for number, prompt in enumerate(batch)
    ]
    found = run(ModelDrafter(model).propose, states, k)
    assert len(model.inputs) == k  # one call per drafted token, whatever the batch
    for state, proposal in zip(states, found, strict=True):
        (alone,) = run(ModelDrafter(FakeModel()).propose, [state], k)
        assert proposal.tokens == alone.tokens
        assert (proposal.probabilities is None) == state.sampling.greedy
        if proposal.probabilities is not None:
            assert torch.equal(proposal.probabilities, alone.probabilities)


@given(prompts, st.integers(1, 4))
def test_sampled_drafts_come_with_what_they_were_sampled_from(prompt: list[int], k: int) -> None:
    model, state = FakeModel(), Writer.start(prompt, 3, SAMPLED).state
    (proposal,) = run(ModelDrafter(model).propose, [state], k)
    expected, rows = sampled_drafts(model, state, k)
    assert list(proposal.tokens) == expected
    torch.testing.assert_close(proposal.probabilities, torch.stack(rows))
    (proposal,) = run(ModelDrafter(model, draws=DraftDraws(sampled=False)).propose, [state], k)
    assert list(proposal.tokens) == greedy_drafts(model, prompt, k)
    assert proposal.probabilities is None


def layer_steps(drafter: Any, writer: Writer, steps: Sequence[Step], check: Any) -> None:
    """Steps of one sequence that the drafter observes; the prompt was scored in two parts."""
    for end in (1, len(writer.tokens)):
        row, hidden = writer.prompt_part(end)
        run(show, drafter, row, hidden, [])
    row, hidden = writer.step(Proposal(), [4])
    run(show, drafter, row, hidden, [4])
    for step in steps:
        (proposal,) = run(drafter.propose, [writer.state], step.k)
        check(proposal, writer, step)
        emitted = [*proposal.tokens[: step.accepted], step.last]
        row, hidden = writer.step(proposal, emitted)
        run(show, drafter, row, hidden, emitted)


@given(prompts, steps)
def test_a_hidden_state_layer_drafts_as_if_it_had_no_state(
    prompt: list[int], steps: list[Step]
) -> None:
    model = FakeLayer()
    drafter = HiddenStateDrafter(model)

    def check(proposal: Proposal, writer: Writer, step: Step) -> None:
        written = writer.tokens
        expected = layer_alone(written, len(written), [], step.k)
        assert list(proposal.tokens) == expected
        if step.interrupted:
            interrupted(model, drafter, writer.state)
        (found,) = run(drafter.propose, [writer.state.assume(step.ahead)], 2)
        assert list(found.tokens) == layer_alone(written, len(written), list(step.ahead), 2)

    layer_steps(drafter, Writer.start(prompt), steps, check)


def block_drafts(state: list[int], k: int) -> list[int]:
    return [int(logits_after(digest(state) + 5 * place).argmax()) for place in range(k)]


@given(prompts, steps)
def test_a_block_model_drafts_as_if_it_had_no_state(prompt: list[int], steps: list[Step]) -> None:
    model = FakeBlock(block_size=3)
    drafter = BlockDrafter(model)

    def check(proposal: Proposal, writer: Writer, step: Step) -> None:
        written = writer.tokens
        pairs = [
            pair_number(target_hidden(written, place), written[place + 1])
            for place in range(len(written) - 1)
        ]
        assert list(proposal.tokens) == block_drafts(pairs, min(step.k, 3))
        if step.ahead:
            calls = len(model.inputs)
            assert run(drafter.propose, [writer.state.assume(step.ahead)], 2)[0].tokens == ()
            assert len(model.inputs) == calls

    layer_steps(drafter, Writer.start(prompt), steps, check)


@given(prompts, steps)
def test_a_block_model_without_hidden_states(prompt: list[int], steps: list[Step]) -> None:
    model = FakeBlock(block_size=3)
    drafter, writer = BlockDrafter(model, reads_hidden_states=False), Writer.start(prompt)
    for step in steps:
        if step.interrupted:
            interrupted(model, drafter, writer.state)
        (proposal,) = run(drafter.propose, [writer.state], step.k)
        assert list(proposal.tokens) == block_drafts(writer.tokens, min(step.k, 3))
        (found,) = run(drafter.propose, [writer.state.assume(step.ahead)], 2)
        assert list(found.tokens) == block_drafts([*writer.tokens, *step.ahead], 2)
        row, hidden = writer.step(proposal, [*proposal.tokens[: step.accepted], step.last])
        run(show, drafter, row, hidden, [])


def test_block_tokens_are_sampled_independently_with_their_distributions() -> None:
    model = FakeBlock()
    state = Writer.start([1, 2, 3], 4, SAMPLED).state
    (proposal,) = run(BlockDrafter(model, reads_hidden_states=False).propose, [state], 4)
    assert proposal.probabilities is not None
    assert len(model.inputs) == 1
    for place, token in enumerate(proposal.tokens):
        logits = logits_after(digest([1, 2, 3]) + 5 * place).reshape(1, 1, -1)
        row = shaped_probabilities(logits, [0.8], [7], [0.9])[0]
        number = uniforms(torch.tensor([104]), torch.tensor([3 + place]), Purpose.DRAFT)
        assert token == int(inverse_cdf(row, number))
        torch.testing.assert_close(proposal.probabilities[place], row[0])


def observed(drafter: Any, writer: Writer, emitted: Sequence[int], proposal: Proposal) -> None:
    row, hidden = writer.step(proposal, emitted)
    run(show, drafter, row, hidden, emitted)


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_few_hidden_states_are_kept(kind: str) -> None:
    """A long prompt in parts, then a long time without drafting."""
    drafter: Any = HiddenStateDrafter(FakeLayer()) if kind == "layer" else BlockDrafter(FakeBlock())
    writer = Writer.start(list(np.arange(300) % VOCABULARY))
    kept = []
    for end in (100, 200, 300):
        row, hidden = writer.prompt_part(end)
        run(show, drafter, row, hidden, [])
        kept.append(len(drafter._states.of(writer.state).hidden))
    for _ in range(150):
        observed(drafter, writer, [3], Proposal())
        kept.append(len(drafter._states.of(writer.state).hidden))
    assert max(kept) <= 70
    (proposal,) = run(drafter.propose, [writer.state], 2)
    assert len(proposal.tokens) == 2
    if kind == "layer":
        written = writer.tokens
        assert list(proposal.tokens) == layer_alone(written, len(written), [], 2)


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_nothing_is_drafted_before_the_prompt_is_scored(kind: str) -> None:
    drafter: Any = HiddenStateDrafter(FakeLayer()) if kind == "layer" else BlockDrafter(FakeBlock())
    scored, new, single = Writer.start([1, 2], 1), Writer.start([1, 2, 3], 2), Writer.start([1], 3)
    observed(drafter, scored, [1], Proposal())
    found = run(drafter.propose, [new.state, scored.state, single.state], 2)
    assert [len(proposal.tokens) for proposal in found] == [0, 2, 0]


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_a_sequence_with_positions_left_out_is_named(kind: str) -> None:
    drafter: Any = HiddenStateDrafter(FakeLayer()) if kind == "layer" else BlockDrafter(FakeBlock())
    cut, fully = Writer.start([1, 2, 3], 8), Writer.start([1, 2, 3], 9)
    observed(drafter, fully, [1], Proposal())
    cut.cached = 1  # the target had the first position cached
    for _ in range(2):
        observed(drafter, cut, [1], Proposal())
        with pytest.raises(DrafterError, match=r"some positions \(sequences 8\)") as caught:
            run(drafter.propose, [fully.state, cut.state], 2)
        assert caught.value.sequence_ids == {8}
    assert len(run(drafter.propose, [fully.state], 2)[0].tokens) == 2
    cut.cached = 0  # its state was taken back, and all is scored again
    observed(drafter, cut, [1], Proposal())
    assert len(run(drafter.propose, [cut.state], 2)[0].tokens) == 2


def test_positions_that_are_scored_again_change_nothing() -> None:
    """An engine may take a request's state back and compute it again."""
    drafter, writer = HiddenStateDrafter(FakeLayer()), Writer.start([1, 2, 3])
    observed(drafter, writer, [4], Proposal())
    run(drafter.propose, [writer.state], 2)
    writer.cached = 0
    observed(drafter, writer, [5], Proposal())
    (proposal,) = run(drafter.propose, [writer.state], 3)
    assert list(proposal.tokens) == layer_alone(writer.tokens, 5, [], 3)


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_missing_or_short_hidden_states_are_refused(kind: str) -> None:
    drafter: Any = HiddenStateDrafter(FakeLayer()) if kind == "layer" else BlockDrafter(FakeBlock())
    row, hidden = Writer.start([1, 2, 3], 6).step(Proposal(), [4])
    with pytest.raises(ArgumentError, match=r"hidden_states: found None, .*reads the target's"):
        run(drafter.observe, [row], Scores(torch.zeros(1, 1, 1)), [[4]])
    with pytest.raises(ArgumentError, match=r"of sequence 6: found shape \[2, 3\].*N >= 3"):
        run(drafter.observe, [row], Scores(torch.zeros(1, 1, 1), [hidden[:2]]), [[4]])


@pytest.mark.parametrize("kind", ["model", "layer", "block"])
def test_forgetting_drops_the_models_state_too(kind: str) -> None:
    made: dict[str, tuple[Any, Any]] = {"model": (FakeModel(), ModelDrafter)}
    made |= {"layer": (FakeLayer(), HiddenStateDrafter), "block": (FakeBlock(), BlockDrafter)}
    model, make = made[kind]
    drafter, writer = make(model), Writer.start([1, 2, 3], 5)
    if kind != "model":
        observed(drafter, writer, [1], Proposal())
    run(drafter.propose, [writer.state], 2)
    assert drafter.sequence_ids == {5}
    drafter.forget(5)
    drafter.forget(6)
    assert drafter.sequence_ids == frozenset()
    assert model.freed == [5, 6]


def test_a_model_that_returns_nonsense_is_refused() -> None:
    @attrs.define(eq=False)
    class Bad(FakeModel):
        answer: torch.Tensor = attrs.field(factory=lambda: torch.zeros(1, 4))

        async def next_logits(self, rows: Sequence[DraftInput]) -> torch.Tensor:
            return self.answer

    states = [Writer.start([1, 2], number).state for number in (3, 4)]
    with pytest.raises(ArgumentError, match=r"logits of the draft model: .*\[1, 4\].*\[2, 'V'\]"):
        run(ModelDrafter(Bad()).propose, states, 1)
    nan = torch.tensor([[0.0, 1.0], [0.0, torch.nan]])
    with pytest.raises(DrafterError, match=r"NaN, \+inf or only -inf \(sequences 4\)"):
        run(ModelDrafter(Bad(answer=nan)).propose, states, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelDrafter(FakeModel(), max_positions=0), "max_positions: found 0"),
        (lambda: HiddenStateDrafter(FakeLayer(), max_positions=-1), "max_positions: found -1"),
        (lambda: BlockDrafter(FakeBlock(), max_positions=0), "max_positions: found 0"),
        (lambda: BlockDrafter(FakeBlock(block_size=0)), "model.block_size: found 0"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
