"""Public bug reports about drafts and their verification as small cases; the number is the row.

| row | report |
|----:|---|
| 1 | vllm-ascend 14883: draft steps saw the keys of rejected tokens |
| 2 | vllm 26498, 29845: padded drafting kept rejected tokens at k = 10 |
| 4 | vllm-ascend 7549: building step 2 rewrote step 1 |
| 5 | vllm-ascend 9605, 10878: positions of one step were reused by the next |
| 7 | vllm-ascend 12079, 12630: a host buffer was filled again before it was read |
| 23 | vllm-ascend 10307: placeholder ids of -1 reached the embedding |
| 25 | vllm-ascend 9221, vllm 16087, 24662, 57941: positions past the draft's maximum |
| 26 | vllm-ascend 9795: the head of a reduced vocabulary was replaced by the target's |
| 44 | vllm-ascend 12036: ranks ran different numbers of draft steps and hung |
| 46 | vllm-ascend 11338: an option pair that never works was accepted |
| 47 | vllm-ascend 10205, 9656: the host waited for the device in every step |
| 52 | vllm-ascend 11337: an overlapping shift clobbered the last token |
| 61 | vllm-ascend 4502, 3133: a device was touched before the fork |
"""

from __future__ import annotations

import subprocess
import sys
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
    layer_alone,
    run,
    show,
)

from ascend_specdecode import (
    ArgumentError,
    BlockDrafter,
    DraftDraws,
    DraftedSequence,
    DrafterError,
    DraftInput,
    DraftVocabulary,
    EngineConfig,
    ExactVerifier,
    HiddenStateDrafter,
    ModelDrafter,
    NgramDrafter,
    PromptLookupDrafter,
    Proposal,
    SamplingParameters,
    SequenceState,
    SuffixDrafter,
    rejection_sample,
    verify_greedy,
)

SAMPLED = SamplingParameters(temperature=1.0)


def observed(drafter: Any, writer: Writer, proposal: Proposal, emitted: Sequence[int]) -> None:
    row, hidden = writer.step(proposal, emitted)
    run(show, drafter, row, hidden, emitted)


def starts(model: Any) -> list[int]:
    return [row.start for (row,) in model.inputs]


def test_case_01_draft_steps_see_47_48_49_tokens() -> None:
    """46 tokens and one emitted; 3 drafts make 50 that the target scored; all are rejected."""
    model, writer = FakeModel(), Writer.start(list(np.arange(47) % VOCABULARY))
    drafter = ModelDrafter(model)
    (proposal,) = run(drafter.propose, [writer.state], 3)
    assert len(writer.tokens) + len(proposal.tokens) == 50
    replacement = (proposal.tokens[0] + 1) % VOCABULARY
    writer.step(proposal, [replacement])
    model.inputs.clear()
    run(drafter.propose, [writer.state], 3)
    assert starts(model) == [47, 48, 49]


def test_case_01_a_layer_sees_as_many_verified_states() -> None:
    layer, writer = FakeLayer(), Writer.start(list(np.arange(47) % VOCABULARY))
    drafter = HiddenStateDrafter(layer)
    observed(drafter, writer, Proposal(), [3])
    (proposal,) = run(drafter.propose, [writer.state], 3)
    observed(drafter, writer, proposal, [(proposal.tokens[0] + 1) % VOCABULARY])
    layer.inputs.clear()
    run(drafter.propose, [writer.state], 3)
    assert starts(layer) == [47, 48, 49]


@pytest.mark.parametrize("accepted", [0, 4, 9, 10])
def test_case_02_a_batch_of_unequal_rows_drafts_as_single_rows(accepted: int) -> None:
    """k = 10, 6 rejected: state of rejected tokens is not seen, whoever is beside."""
    model = FakeModel()
    drafter = ModelDrafter(model)
    writers = [Writer.start([1, 2, 3], 1), Writer.start([4] * 9, 2), Writer.start([5], 3)]
    for _ in range(3):
        found = run(drafter.propose, [writer.state for writer in writers], 10)
        for writer, proposal in zip(writers, found, strict=True):
            alone = Writer.start(writer.tokens, 7).state
            assert run(ModelDrafter(FakeModel()).propose, [alone], 10)[0].tokens == proposal.tokens
        for number, (writer, proposal) in enumerate(zip(writers, found, strict=True)):
            keep = max(accepted - number, 0)
            writer.step(proposal, [*proposal.tokens[:keep], number])


def test_case_02_a_state_that_keeps_rejected_tokens_is_seen() -> None:
    """The comparison above tells drafts after kept tokens from those after the right ones."""
    one, other = FakeModel(), FakeModel()
    run(one.next_logits, [DraftInput(0, 0, np.array([1, 2, 9]))])
    kept = run(one.next_logits, [DraftInput(0, 3, np.array([4]))])
    run(other.next_logits, [DraftInput(0, 0, np.array([1, 2, 9]))])
    cut = run(other.next_logits, [DraftInput(0, 2, np.array([4]))])
    assert not torch.equal(kept, cut)


@pytest.mark.parametrize("kind", ["model", "layer"])
def test_case_04_a_later_step_changes_no_earlier_one(kind: str) -> None:
    model: Any = FakeModel() if kind == "model" else FakeLayer()
    drafter: Any = ModelDrafter(model) if kind == "model" else HiddenStateDrafter(model)
    writer = Writer.start([1, 2, 3, 4])
    if kind == "layer":
        observed(drafter, writer, Proposal(), [5])
    run(drafter.propose, [writer.state], 1)
    first = [(row.start, row.tokens.copy(), row.hidden_states) for (row,) in model.inputs]
    run(drafter.propose, [writer.state], 3)
    for (start, tokens, hidden), (row,) in zip(first, model.inputs, strict=False):
        assert (row.start, row.tokens.tolist()) == (start, tokens.tolist())
        assert row.hidden_states is hidden
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        model.inputs[0][0].start = 9


@pytest.mark.parametrize("kind", ["model", "layer"])
def test_case_05_each_draft_step_has_a_position_of_its_own(kind: str) -> None:
    model: Any = FakeModel() if kind == "model" else FakeLayer()
    drafter: Any = ModelDrafter(model) if kind == "model" else HiddenStateDrafter(model)
    writer = Writer.start([1] * 8)
    if kind == "layer":
        observed(drafter, writer, Proposal(), [1])
        model.inputs.clear()
    run(drafter.propose, [writer.state], 3)
    ends = [row.end - 1 for (row,) in model.inputs]
    assert ends == [7, 8, 9]


def test_case_07_a_buffer_that_is_filled_again_changes_no_draft() -> None:
    prompt = np.array([1, 2, 3, 9, 1, 2])
    state = SequenceState.of(prompt)
    prompt[:] = 7
    for drafter in (PromptLookupDrafter(), SuffixDrafter()):
        assert run(drafter.propose, [state], 2)[0].tokens == (3, 9)
    layer, writer = HiddenStateDrafter(FakeLayer()), Writer.start([1, 2, 3])
    observed(layer, writer, Proposal(), [4])  # writes over the hidden states afterwards
    (proposal,) = run(layer.propose, [writer.state], 2)
    assert list(proposal.tokens) == layer_alone(writer.tokens, 4, [], 2)


def test_case_23_placeholders_never_reach_a_model() -> None:
    """A verified row is [5, -1, -1, -1]: one token is emitted, and the models see no -1."""
    row = verify_greedy(torch.tensor([[6, 7, 8]]), torch.tensor([[5, 1, 1, 1]]), torch.tensor([3]))
    assert row.tolist() == [[5, -1, -1, -1]]
    state = SequenceState.of([1, 2], 0)
    logits = torch.nn.functional.one_hot(torch.tensor([[5, 1, 1, 1]]), VOCABULARY).float()
    (emitted,) = ExactVerifier().verify_logits(
        [DraftedSequence(state, Proposal((6, 7, 8)))], logits
    )
    assert emitted == (5,)
    model, writer = FakeModel(), Writer.start([1, 2])
    writer.step(Proposal((6, 7, 8)), emitted)
    run(ModelDrafter(model).propose, [writer.state], 2)
    assert model.inputs[0][0].tokens.tolist() == [1, 2, 5]


def test_case_23_placeholders_are_refused_everywhere() -> None:
    probs = torch.full((1, 5, 4), 0.25)
    with pytest.raises(ArgumentError, match=r"draft_tokens\[0, 1\]: found -1"):
        rejection_sample(torch.tensor([[3, -1, -1, -1]]), probs)
    with pytest.raises(ArgumentError, match=r"tokens\[1\]: found -1"):
        SequenceState.of([5, -1, -1, -1])
    with pytest.raises(ArgumentError, match=r"tokens\[1\]: found -1"):
        NgramDrafter(1, 2, 3).propose([5, -1, -1, -1])
    drafted = DraftedSequence(SequenceState.of([5]), Proposal((3, -1)))
    with pytest.raises(DrafterError, match=r"sequence 0: found tokens \[3, -1\]"):
        ExactVerifier().verify_logits([drafted], torch.zeros(1, 3, 4))


LIMIT = 2048


@pytest.mark.parametrize(("length", "drafted"), [(2040, 3), (2046, 3), (2047, 2), (2048, 1)])
def test_case_25_a_model_never_computes_past_its_last_position(length: int, drafted: int) -> None:
    model, writer = FakeModel(), Writer.start([1] * length)
    drafter = ModelDrafter(model, max_positions=LIMIT)
    beside = Writer.start([1, 2], 1)
    first, second = run(drafter.propose, [writer.state, beside.state], 3)
    assert (len(first.tokens), len(second.tokens)) == (drafted, 3)
    assert max(row.end for rows in model.inputs for row in rows) <= LIMIT
    writer.step(first, [*first.tokens, *[1] * (LIMIT + 1 - length - drafted)])
    assert run(drafter.propose, [writer.state], 3)[0].tokens == ()


@pytest.mark.parametrize(("length", "drafted"), [(2046, 3), (2047, 3), (2048, 2), (2050, 0)])
def test_case_25_nor_does_a_layer_on_hidden_states(length: int, drafted: int) -> None:
    layer, writer = FakeLayer(), Writer.start([1] * (length - 1))
    drafter = HiddenStateDrafter(layer, max_positions=LIMIT)
    observed(drafter, writer, Proposal(), [1])
    (proposal,) = run(drafter.propose, [writer.state], 3)
    assert len(proposal.tokens) == drafted
    assert max([row.end for rows in layer.inputs for row in rows], default=0) <= LIMIT
    for _ in range(100):  # beyond the limit nothing is kept
        observed(drafter, writer, Proposal(), [1])
    kept = drafter._states.of(writer.state).hidden
    assert kept is not None
    assert len(kept) <= 2


@pytest.mark.parametrize(("length", "drafted"), [(2044, 4), (2046, 2), (2047, 1), (2048, 0)])
def test_case_25_nor_does_a_block_model(length: int, drafted: int) -> None:
    model = FakeBlock()
    drafter = BlockDrafter(model, reads_hidden_states=False, max_positions=LIMIT)
    states = [Writer.start([1] * length).state, Writer.start([1, 2], 1).state]
    first, second = run(drafter.propose, states, 4)
    assert (len(first.tokens), len(second.tokens)) == (drafted, 4)


REDUCED = DraftVocabulary.from_d2t(torch.tensor([1, 3, 3, 6]), 10)  # draft 0..3: 1, 4, 5, 9


@pytest.mark.parametrize("sampling", [SamplingParameters(), SAMPLED], ids=["greedy", "sampled"])
def test_case_26_a_reduced_vocabulary_is_mapped_by_d2t(sampling: SamplingParameters) -> None:
    model = FakeModel(size=4)
    state = Writer.start([1, 2], 0, sampling).state
    draws = DraftDraws(vocabulary=REDUCED)
    (proposal,) = run(ModelDrafter(model, draws=draws).propose, [state], 4)
    (unmapped,) = run(ModelDrafter(FakeModel(size=4)).propose, [state], 1)
    assert set(proposal.tokens) <= {1, 4, 5, 9}
    assert proposal.tokens[0] == [1, 4, 5, 9][unmapped.tokens[0]]
    if proposal.probabilities is not None:
        assert unmapped.probabilities is not None
        assert proposal.probabilities.shape == (4, 10)
        torch.testing.assert_close(
            proposal.probabilities[0, [1, 4, 5, 9]], unmapped.probabilities[0]
        )
        assert float(proposal.probabilities[:, [0, 2, 3, 6, 7, 8]].abs().sum()) == 0


def test_case_26_the_targets_own_choice_is_accepted_through_the_map() -> None:
    """The report: almost all drafts were rejected, since draft ids were taken for target ids."""
    logits = torch.tensor([[0.0, 5.0, 0.0, 1.0]])  # the draft is sure of its id 1: target id 4
    (token,) = DraftDraws(vocabulary=REDUCED).draw([SequenceState.of([1])], [1], logits)[0][:1]
    (wrong,) = DraftDraws().draw([SequenceState.of([1])], [1], logits)[0][:1]
    target = torch.tensor([[4, 7]])
    count = torch.tensor([1])
    assert verify_greedy(torch.tensor([[token]]), target, count).tolist() == [[4, 7]]
    assert verify_greedy(torch.tensor([[wrong]]), target, count).tolist() == [[4, -1]]


@pytest.mark.parametrize("k", [1, 3, 5])
def test_case_44_the_number_of_draft_steps_depends_only_on_k(k: int) -> None:
    """Not on tokens, sampling, lengths or how many sequences there are: ranks stay in step."""
    batches = [
        [Writer.start([1], 1)],
        [Writer.start([1, 2, 3], 1, SAMPLED), Writer.start([4] * 30, 2)],
        [Writer.start([number], number) for number in range(7)],
    ]
    for batch in batches:
        model = FakeModel()
        run(ModelDrafter(model).propose, [writer.state for writer in batch], k)
        assert [len(rows) for rows in model.inputs] == [len(batch)] * k


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NgramDrafter(3, 2, 4), r"max_n: found 2, allowed at least min_n \(3\)"),
        (lambda: PromptLookupDrafter(3, 2), r"max_n: found 2, allowed at least min_n \(3\)"),
        (lambda: ModelDrafter(FakeModel(), max_positions=0), "max_positions: found 0"),
        (lambda: BlockDrafter(FakeBlock(block_size=0)), "model.block_size: found 0"),
        (
            lambda: EngineConfig(max_num_seqs=8, max_num_batched_tokens=4),
            r"max_num_batched_tokens: found 4, allowed at least max_num_seqs \(8\)",
        ),
        (
            lambda: DraftVocabulary.from_d2t(torch.tensor([0, 9]), 10),
            r"target_ids: found 10, allowed token ids 0..V-1 \(V = 10\)",
        ),
    ],
)
def test_case_46_settings_that_can_never_work_are_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_case_47_verification_never_waits_for_the_device(dtype: torch.dtype) -> None:
    """Tensors without values: any read back to the host, or a copy of one, would raise."""
    with torch.device("meta"):
        tokens, counts = torch.zeros(2, 3, dtype=dtype), torch.zeros(2, dtype=dtype)
        found = verify_greedy(tokens, torch.zeros(2, 4, dtype=dtype), counts)
        assert found.dtype == torch.int64
        found = rejection_sample(
            tokens, torch.zeros(2, 4, 5), num_draft_tokens=counts, seeds=counts.long()
        )
        assert found.dtype == torch.int64


def test_case_52_tokens_are_shifted_left_without_losing_the_last() -> None:
    """Target positions 0..3 hold [1, 2, 3, 4] and 9 is emitted: the layer gets [2, 3, 4, 9]."""
    layer, writer = FakeLayer(), Writer.start([1, 2, 3, 4])
    drafter = HiddenStateDrafter(layer)
    observed(drafter, writer, Proposal(), [9])
    run(drafter.propose, [writer.state], 1)
    ((row,),) = layer.inputs
    assert row.tokens.tolist() == [2, 3, 4, 9]
    assert row.hidden_states is not None
    assert row.hidden_states[:, 2].tolist() == [1, 2, 3, 4]  # each beside its own position's token
    assert writer.tokens == [1, 2, 3, 4, 9]


def test_case_52_the_next_step_shifts_only_what_is_new() -> None:
    layer, writer = FakeLayer(), Writer.start([1, 2])
    drafter = HiddenStateDrafter(layer)
    observed(drafter, writer, Proposal(), [3])
    (proposal,) = run(drafter.propose, [writer.state], 2)
    observed(drafter, writer, proposal, [*proposal.tokens, 8])
    layer.inputs.clear()
    run(drafter.propose, [writer.state], 1)
    ((row,),) = layer.inputs
    assert row.start == 2
    assert row.tokens.tolist() == [*proposal.tokens, 8]


TOUCH = """
import importlib, os, pkgutil, sys, types

class Device(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"the device was touched: torch_npu.{name}")

sys.modules["torch_npu"] = Device("torch_npu")
import ascend_specdecode.drafters
for module in pkgutil.iter_modules(ascend_specdecode.drafters.__path__):
    importlib.import_module(f"ascend_specdecode.drafters.{module.name}")
if os.fork() == 0:
    os._exit(0)
assert os.wait()[1] == 0
print("untouched")
"""


def test_case_61_importing_touches_no_device() -> None:
    """The whole package: tests/layers of the repository."""
    done = subprocess.run(
        [sys.executable, "-c", TOUCH], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "untouched\n", done.stderr
