"""Public bug reports of systems of this kind, as small cases of what goes into a draft.

| row | report |
|----:|---|
| 21 | vllm-ascend 9724: blocks of linear-attention states were divided between ranks |
| 23 | vllm-ascend 10307: placeholder ids of -1 reached the embedding |
| 26 | vllm-ascend 9795: the head of a reduced vocabulary was replaced by the target's |
| 44 | vllm-ascend 12036: ranks ran different numbers of draft steps and hung |
| 45 | vllm-ascend 12704: an eager draft emptied the target's capture sizes |
| 46 | vllm-ascend 11338: an option pair that never works was accepted |
| 47 | vllm-ascend 10205, 9656: copies that convert made the host wait in every step |
| 52 | vllm-ascend 11337: an overlapping shift clobbered the last token |
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_attn_backends import (
    AscendAttentionMetadataBuilder,
    AscendFAMetadataBuilder,
    AscendFlashAttentionMetadataBuilder,
    AscendSFAMetadataBuilder,
    AttentionBatch,
    CacheContent,
    CacheGroup,
    CaptureSizes,
    ConfigChangedError,
    DraftVocabulary,
    GraphParams,
    InvalidFieldError,
    SingleRankGroup,
    ThreadDCPGroup,
    agreed_step_count,
    blocks_per_rank,
    config_unchanged,
    copy_into,
    copy_to_device,
    draft_option_refusals,
    draft_step,
    keep_accepted,
    run_ranks,
    sanitized_input_ids,
    shift_left,
)
from ascend_attn_backends.context_parallel import RankMismatchError


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [1, 10, 11])
def test_case_21_only_blocks_of_tokens_are_shared(num_blocks: int, size: int) -> None:
    """One attention and one linear layer: every state block keeps its place on every rank."""
    assert blocks_per_rank(num_blocks, CacheContent.STATE, size) == num_blocks
    shared = blocks_per_rank(num_blocks, CacheContent.TOKENS, size)
    assert shared * size >= num_blocks > (shared - 1) * size
    states = torch.arange(blocks_per_rank(num_blocks, CacheContent.STATE, size))
    last = torch.tensor([num_blocks - 1])  # a request whose state lies in the last block
    assert states[last].tolist() == [num_blocks - 1]
    if shared < num_blocks:
        with pytest.raises(IndexError):  # control: the pool divided like that of tokens
            torch.arange(shared)[last]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, CacheContent.TOKENS, 1), "num_blocks: found -1"),
        ((1, CacheContent.TOKENS, 0), "context_parallel_size: found 0"),
    ],
)
def test_case_21_impossible_counts_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        blocks_per_rank(*arguments)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_case_23_placeholders_reach_no_embedding(dtype: torch.dtype) -> None:
    ids, table = torch.tensor([5, -1, -1, -1], dtype=dtype), torch.randn(8, 4)
    before = ids.clone()
    clean = sanitized_input_ids(ids)
    assert clean.tolist() == [5, 0, 0, 0]
    assert clean.dtype == dtype
    assert torch.equal(ids, before)  # what the sampler reads
    assert torch.equal(torch.nn.functional.embedding(clean, table)[0], table[5])
    with pytest.raises(IndexError):  # control
        torch.nn.functional.embedding(ids, table)


@given(st.lists(st.integers(-2, 50), min_size=1, max_size=20), st.integers(0, 9))
def test_case_23_the_forward_buffer_is_written_in_place(ids: list[int], fill: int) -> None:
    source, buffer = torch.tensor(ids), torch.full((len(ids),), 99)
    assert sanitized_input_ids(source, fill, buffer) is buffer
    assert buffer.tolist() == [value if value >= 0 else fill for value in ids]
    assert source.tolist() == ids


def test_case_23_what_does_not_fit_is_named() -> None:
    with pytest.raises(InvalidFieldError, match="fill: found -1"):
        sanitized_input_ids(torch.tensor([1]), -1)
    with pytest.raises(
        InvalidFieldError, match=r"out: found torch.int32 \[1\]; allowed: torch.int6"
    ):
        sanitized_input_ids(torch.tensor([1]), out=torch.zeros(1, dtype=torch.int32))


class TestCase26:
    """Draft vocabulary of 4 tokens, target of 10."""

    target_ids = torch.tensor([1, 4, 7, 9])

    @pytest.mark.parametrize("given_as", ["ids", "d2t"])
    def test_case_26_drafts_are_mapped_through_d2t(self, given_as: str) -> None:
        if given_as == "d2t":
            vocabulary = DraftVocabulary.from_d2t(self.target_ids - torch.arange(4), 10)
        else:
            vocabulary = DraftVocabulary.from_target_ids(self.target_ids, 10)
        assert vocabulary.size == 4
        drafts = torch.tensor([[0, 3], [-1, 2]], dtype=torch.int32)
        mapped = vocabulary.to_target_ids(drafts)
        assert mapped.tolist() == [[1, 9], [-1, 7]]
        assert mapped.dtype == torch.int32

    def test_case_26_logits_and_ids_agree(self) -> None:
        vocabulary = DraftVocabulary.from_target_ids(self.target_ids, 10)
        logits = torch.randn(3, 4)
        wide = vocabulary.to_target_logits(logits)
        assert wide.shape == (3, 10)
        assert torch.equal(wide[:, self.target_ids], logits)
        assert wide.isneginf().sum() == 3 * 6
        best = vocabulary.to_target_ids(logits.argmax(-1))
        assert torch.equal(wide.argmax(-1), best)
        assert torch.allclose(wide.softmax(-1)[:, self.target_ids], logits.softmax(-1))

    def test_case_26_the_drafts_own_head_is_kept(self) -> None:
        vocabulary = DraftVocabulary.from_target_ids(self.target_ids, 10)
        vocabulary.check_head(torch.zeros(4, 8))
        with pytest.raises(
            InvalidFieldError, match=r"10 rows \(the target's head\); allowed: the 4"
        ):
            vocabulary.check_head(torch.zeros(10, 8))
        with pytest.raises(InvalidFieldError, match="head: found 6 rows; allowed"):
            vocabulary.check_head(torch.zeros(6, 8))

    def test_case_26_control_a_replaced_head_is_nearly_always_rejected(self) -> None:
        """Greedy target and a perfect draft: through the map all are accepted, without it few."""
        vocabulary = DraftVocabulary.from_target_ids(self.target_ids, 10)
        g = torch.Generator().manual_seed(0)
        wanted = self.target_ids[torch.randint(4, (200,), generator=g)]
        drafted = torch.searchsorted(self.target_ids, wanted)
        assert torch.equal(vocabulary.to_target_ids(drafted), wanted)
        assert (drafted == wanted).float().mean() < 0.1

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([1, 10], r"target_ids\[1\]: found 10; allowed: 0 to 9"),
            ([-1], r"target_ids\[0\]: found -1"),
            ([3, 3], "target_ids: found an id twice"),
        ],
    )
    def test_case_26_impossible_maps_are_named(self, ids: list[int], message: str) -> None:
        with pytest.raises(InvalidFieldError, match=message):
            DraftVocabulary.from_target_ids(torch.tensor(ids), 10)

    def test_case_26_logits_of_another_vocabulary_are_named(self) -> None:
        vocabulary = DraftVocabulary.from_target_ids(self.target_ids, 10)
        with pytest.raises(
            InvalidFieldError, match=r"logits: found \[2, 10\]; allowed: \[..., 4\]"
        ):
            vocabulary.to_target_logits(torch.zeros(2, 10))

    def test_case_26_the_map_moves_to_the_device_of_the_drafts(self) -> None:
        vocabulary = DraftVocabulary.from_target_ids(self.target_ids, 10).to("meta")
        drafts = torch.zeros(2, 3, dtype=torch.int32, device="meta")
        assert vocabulary.to_target_ids(drafts).shape == (2, 3)
        assert vocabulary.to_target_logits(torch.zeros(2, 4, device="meta")).shape == (2, 10)


def draft_steps(group: ThreadDCPGroup, count: int) -> int:
    """Draft steps, each with a collective."""
    for step in range(count):
        group.all_gather(torch.tensor([step]))
    return count


@pytest.mark.parametrize("wanted", [[0, 3], [3, 0], [3, 3], [1, 5, 0, 2]])
def test_case_44_every_rank_runs_the_same_number_of_draft_steps(wanted: list[int]) -> None:
    """A rank with a prefill or nothing to do beside one that drafts k = 3 tokens."""
    ran = run_ranks(
        len(wanted),
        lambda group: draft_steps(group, agreed_step_count(wanted[group.rank], group)),
    )
    assert ran == [max(wanted)] * len(wanted)
    if len(set(wanted)) > 1:
        with pytest.raises(RankMismatchError):  # control: each rank by itself
            run_ranks(len(wanted), lambda group: draft_steps(group, wanted[group.rank]), timeout=5)


def test_case_44_one_rank_agrees_with_itself() -> None:
    assert agreed_step_count(3, SingleRankGroup()) == 3
    with pytest.raises(InvalidFieldError, match="wanted: found -1"):
        agreed_step_count(-1, SingleRankGroup())


@dataclasses.dataclass
class Compilation:
    sizes: list[int]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@attrs.define
class Model:
    name: str
    dtypes: set[str]


class Config:
    """What engines have: a tree of dataclasses, attrs classes and plain objects, with a cycle."""

    def __init__(self) -> None:
        self.compilation = Compilation([1, 2, 4], {"level": {"deep": 3}})
        self.model = Model("target", {"bfloat16"})
        self.eager, self.tensor = False, torch.zeros(2)
        self.parent = self


def eager_draft_config(target: Config, *, copied: bool) -> Compilation:
    part = copy.deepcopy(target.compilation) if copied else target.compilation
    part.sizes.clear()  # an eager draft captures nothing
    return part


def test_case_45_making_a_draft_config_leaves_the_target_alone() -> None:
    target = Config()
    with config_unchanged(target, "vllm_config"):
        assert eager_draft_config(target, copied=True).sizes == []
    assert target.compilation.sizes == [1, 2, 4]
    message = r"vllm_config\.compilation\.sizes: found \[\]; allowed: \[1, 2, 4\], as before"
    with pytest.raises(ConfigChangedError, match=message), config_unchanged(target, "vllm_config"):
        eager_draft_config(target, copied=False)


EDITS: dict[str, Any] = {
    "compilation.options.level.deep": lambda c: c.compilation.options["level"].update(deep=4),
    "compilation.options.more": lambda c: c.compilation.options.update(more=1),
    "compilation": lambda c: setattr(c, "compilation", None),
    "model.name": lambda c: setattr(c.model, "name", "draft"),
    "model.dtypes": lambda c: c.model.dtypes.add("float16"),
    "eager": lambda c: setattr(c, "eager", True),
    "extra": lambda c: setattr(c, "extra", 1),
    "tensor": lambda c: c.tensor.add_(1),
    "parent": lambda c: delattr(c, "parent"),
}


@pytest.mark.parametrize("path", EDITS)
def test_case_45_any_edit_is_named(path: str) -> None:
    target = Config()
    with pytest.raises(ConfigChangedError) as raised, config_unchanged(target):
        EDITS[path](target)
    assert raised.value.path == f"config.{path}"
    assert raised.value.before != raised.value.after


def test_case_45_errors_of_the_context_are_not_replaced() -> None:
    def edit_and_fail() -> None:
        target = Config()
        with config_unchanged(target):
            target.eager = True
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        edit_and_fail()


@pytest.mark.parametrize("mode", ["full", "full_decode_only", "full_and_piecewise"])
def test_case_46_an_option_pair_that_never_works_is_refused(mode: str) -> None:
    options = {"disable_padded_drafter_batch": True, "graph_mode": mode}
    (refusal,) = draft_option_refusals(options)
    assert refusal.rule == "draft_options.unpadded_drafts_in_full_graphs"
    assert refusal.parameter == "disable_padded_drafter_batch, graph_mode"
    assert refusal.found == f"disable_padded_drafter_batch=True, graph_mode={mode}"
    assert "number of tokens per request" in refusal.allowed
    for alone in (
        {"disable_padded_drafter_batch": True},
        {"disable_padded_drafter_batch": True, "graph_mode": "piecewise"},
        {"disable_padded_drafter_batch": False, "graph_mode": mode},
        {"graph_mode": mode},
        {},
    ):
        assert draft_option_refusals(alone) == []


class CheckingStream(TorchDispatchMode):
    """Notes copies into existing memory that convert: on a device the host waits for these."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[torch.dtype, torch.dtype]] = []
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies += 1
            if args[0].dtype != args[1].dtype:
                self.waits.append((args[1].dtype, args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_case_47_no_copy_converts() -> None:
    """Preparing steps of every kind, and refreshing what a graph reads."""
    batch = AttentionBatch.from_lengths([2, 2], [20, 33], 16, causal=True)
    mixed = AttentionBatch.from_lengths([2, 2], [20, 33], 16, causal=[True, False])
    params = GraphParams("target", CaptureSizes([8], 2), {"": CacheGroup(16, 4)})
    rejected = torch.tensor([1, 0], dtype=torch.int32)
    with CheckingStream() as stream:
        AttentionBatch.from_lengths([2, 2], [20, 33], 16, causal=[True, False])
        AscendAttentionMetadataBuilder(16).build(mixed)
        AscendFAMetadataBuilder(16).build(batch)
        AscendSFAMetadataBuilder(16).build(batch)
        AscendFlashAttentionMetadataBuilder(16).build(batch, rejected)
        draft_step(batch, rejected, offset=0, query_len=1, block_size=16, max_model_len=64)
        keep_accepted(batch, rejected)
        params.prepare(batch, torch.tensor([18, 19, 31, 32]))
        copy_to_device(rejected, "cpu")
    assert stream.copies > 10
    assert stream.waits == []


def test_case_47_a_converting_copy_is_refused() -> None:
    target, source = torch.zeros(2, dtype=torch.int32), torch.tensor([1, 2])
    with CheckingStream() as stream:
        target.copy_(source, non_blocking=True)  # control: the stream does notice
    assert stream.waits == [(torch.int64, torch.int32)]
    with pytest.raises(InvalidFieldError, match=r"source: found torch\.int64"):
        copy_into(target, source)


@pytest.mark.parametrize("in_place", [True, False])
def test_case_52_the_last_token_survives_the_shift(in_place: bool) -> None:
    ids, starts = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 4], dtype=torch.int32)
    moved = shift_left(ids, starts, torch.tensor([9]), out=ids if in_place else None)
    assert moved.tolist() == [2, 3, 4, 9]
    assert (moved is ids) == in_place
    assert ids.tolist() == ([2, 3, 4, 9] if in_place else [1, 2, 3, 4])


@given(
    st.lists(st.integers(0, 6), min_size=0, max_size=6),
    st.integers(0, 4),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
)
def test_case_52_every_request_is_shifted_by_itself(
    lens: list[int], padding: int, dtype: torch.dtype, in_place: bool
) -> None:
    """Against the definition; requests without tokens and padding tokens among them."""
    total = sum(lens)
    ids = torch.arange(100, 100 + total + padding, dtype=dtype)
    starts = torch.tensor([0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()])
    following = torch.arange(900, 900 + len(lens), dtype=dtype)
    expected, first = [], 0
    for row, count in enumerate(lens):
        own = ids[first : first + count].tolist()
        expected += [*own[1:], 900 + row] if count else []
        first += count
    expected += ids[total:].tolist()
    out = ids if in_place else torch.zeros_like(ids)
    assert shift_left(ids, starts.int(), following, out) is out
    assert out.tolist() == expected


def test_case_52_control_overlapping_slices_may_clobber() -> None:
    """The fault itself, where the copy runs from the end: each token has overwritten the next."""
    ids = torch.tensor([1, 2, 3, 4])
    for place in range(2, -1, -1):
        ids[place] = ids[place + 1]
    assert ids.tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize(
    "following", [torch.tensor([9], dtype=torch.int32), torch.tensor([9, 9]), torch.tensor([])]
)
def test_case_52_what_does_not_fit_is_named(following: torch.Tensor) -> None:
    with pytest.raises(InvalidFieldError, match=r"next_ids: found .*allowed: torch.int64 \[1\]"):
        shift_left(torch.tensor([1, 2]), torch.tensor([0, 2]), following)


def test_meta_tensors_run_through() -> None:
    """Nothing of it reads a value on the host."""
    ids, starts = torch.zeros(6, dtype=torch.int64, device="meta"), torch.zeros(3, device="meta")
    assert sanitized_input_ids(ids).shape == (6,)
    following = torch.zeros(2, dtype=torch.int64, device="meta")
    assert shift_left(ids, starts.int(), following).shape == (6,)
