"""Prefill context parallelism of the latent backends: tokens of prompts are spread over ranks.

With shared keys or with all keys on every rank, together with ranks that share heads or without:
the answer is that of one rank, which is that of the float64 formula. Public bug reports:

| row | report |
|----:|---|
| 16 | vllm-ascend 10580: a small last chunk of a prompt was taken for a decode |
| 44 | vllm-ascend 12036: ranks ran different numbers of steps |
| 49 | vllm-ascend 8547: equal numbers of decode tokens per request were assumed |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from attn_backends_support import TOLERANCES, steps
from cp_support import (
    BLOCK,
    DRAFTS,
    SPREAD,
    STEPS,
    ChangedGroup,
    Layout,
    Ranks,
    compare_sparse,
    finite_lse,
    joined,
    kinds,
    latent_rank,
    layouts,
    lost_shard,
    on_ranks,
    sparse_rank,
    thread_ranks,
)
from hypothesis import given
from hypothesis import strategies as st
from latent_support import SCALE, LatentScenario
from sparse_oracle import SparseStep

from ascend_attn_backends import (
    AscendMlaDCPMetadataBuilder,
    AscendMlaPCPImpl,
    AscendMlaPCPMetadataBuilder,
    AscendSFAPCPMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    ContextShard,
    InvalidFieldError,
    LatentRankStep,
    PrefillShard,
    run_ranks,
    segment_batch,
    sharded_batch,
)
from ascend_attn_ops import sanitize

TOLERANCE = TOLERANCES[torch.float32]
NAMES = {
    "2": Layout(tokens=2),
    "4": Layout(tokens=4),
    "2x2": Layout(tokens=2, heads=2),
    "2, all keys": Layout(tokens=2, shares_keys=False),
    "4, all keys": Layout(tokens=4, shares_keys=False),
    "2x2, keys of 2": Layout(tokens=2, heads=2, shares_keys=False),
}
Steps = tuple[list[int], list[int]]


def dense(step: LatentScenario, flags: list[bool], layout: Layout) -> torch.Tensor:
    return joined(on_ranks(layout, lambda ranks: latent_rank(step, flags, layout, ranks)), layout)


def sparse(
    step: SparseStep, flags: list[bool], layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    found = on_ranks(layout, lambda ranks: sparse_rank(step, flags, layout, ranks))
    for choice, _ in found[1:]:
        assert torch.equal(choice.sort(-1).values, found[0][0].sort(-1).values)
    return found[0][0], joined([output for _, output in found], layout)


@st.composite
def flagged(draw: st.DrawFn, **options: int) -> tuple[Steps, list[bool]]:
    """A step, and which of its requests are prefills; up to 20 tokens each."""
    step = draw(steps(max_query=20, **options))
    return step, draw(kinds(step[0]))


@given(
    flagged(),
    layouts(SPREAD),
    st.sampled_from(["causal", "none", "first alone"]),
    st.integers(0, 99),
)
def test_dense_latent_attention_of_any_layout(
    step: tuple[Steps, list[bool]], layout: Layout, causal: str, seed: int
) -> None:
    lens, flags = step
    masks = {"causal": True, "none": False, "first alone": [True, *[False] * (len(flags) - 1)]}
    scenario = LatentScenario(*lens, causal=masks[causal], seed=seed)
    found = dense(scenario, flags, layout)
    torch.testing.assert_close(found.double(), scenario.expected()[0], **TOLERANCE)


@given(flagged(max_reqs=4), layouts(SPREAD), st.booleans(), st.integers(0, 99))
def test_sparse_attention_of_any_layout(
    step: tuple[Steps, list[bool]], layout: Layout, causal: bool, seed: int
) -> None:
    """The choice is that of one rank, made among the keys of all ranks' tokens."""
    lens, flags = step
    scenario = SparseStep(*lens, causal=causal, seed=seed)
    compare_sparse(scenario, *sparse(scenario, flags, layout), TOLERANCE)


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("name", STEPS)
def test_named_steps(name: str, layout: str) -> None:
    lens, flags = STEPS[name][:2], STEPS[name][2]
    scenario = LatentScenario(*lens)
    found = dense(scenario, flags, NAMES[layout])
    torch.testing.assert_close(found.double(), scenario.expected()[0], **TOLERANCE)
    chosen = SparseStep(*lens)
    compare_sparse(chosen, *sparse(chosen, flags, NAMES[layout]), TOLERANCE)


@pytest.mark.parametrize("layout", ["2x2", "2, all keys"])
def test_half_precision_keeps_the_tolerance_of_the_operators(layout: str) -> None:
    lens, flags = STEPS["mixed"][:2], STEPS["mixed"][2]
    dtype = torch.bfloat16
    found = on_ranks(
        NAMES[layout],
        lambda ranks: latent_rank(LatentScenario(*lens, dtype=dtype), flags, NAMES[layout], ranks),
    )
    output = torch.cat(found[: NAMES[layout].heads], 1).double()
    expected, _ = LatentScenario(*lens, dtype=dtype).expected()
    torch.testing.assert_close(output, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("layout", ["2x2", "4, all keys"])
def test_operators_see_sane_values_on_every_rank(layout: str) -> None:
    """The sanitizer checks lengths, prefix sums and blocks of every call."""
    lens, flags = STEPS["mixed"][:2], STEPS["mixed"][2]
    with sanitize():
        scenario = LatentScenario(*lens)
        found = dense(scenario, flags, NAMES[layout])
        torch.testing.assert_close(found.double(), scenario.expected()[0], **TOLERANCE)
        chosen = SparseStep(*lens)
        compare_sparse(chosen, *sparse(chosen, flags, NAMES[layout]), TOLERANCE)


@pytest.mark.parametrize("layout", ["2", "2x2", "2x2, keys of 2"])
def test_control_an_owner_of_another_interleave_differs(layout: str) -> None:
    whole = NAMES[layout]
    wrong = attrs.evolve(whole, interleave=2, read_interleave=1)
    size = whole.shard(0).size
    scenario = LatentScenario([1], [19 * size])  # the ranks' counts depend on the interleave
    expected, _ = scenario.expected()
    torch.testing.assert_close(dense(scenario, [False], whole).double(), expected, **TOLERANCE)
    found = on_ranks(wrong, lambda ranks: latent_rank(scenario, [False], wrong, ranks))
    output = torch.cat(found[: wrong.heads], 1)
    assert not torch.allclose(output.double(), expected, **TOLERANCE)


@pytest.mark.parametrize("change", [lost_shard, finite_lse])
@pytest.mark.parametrize("backend", ["mla", "sfa"])
def test_control_a_wrong_merge_differs(
    backend: str, change: Callable[[int, torch.Tensor], torch.Tensor]
) -> None:
    """A rank's partial results are dropped, and a rank without keys has a finite lse."""
    lengths = ([2], [3]) if change is finite_lse else ([6], [38])
    layout, flags = NAMES["4"], [True]

    def body(ranks: Ranks, *, broken: bool) -> torch.Tensor:
        if broken:
            ranks = attrs.evolve(ranks, tokens=ChangedGroup(ranks.tokens, change))
        if backend == "mla":
            return latent_rank(LatentScenario(*lengths), flags, layout, ranks)
        return sparse_rank(SparseStep(*lengths), flags, layout, ranks)[1]

    right, wrong = (
        on_ranks(layout, lambda ranks, b=broken: body(ranks, broken=b))[0]
        for broken in (False, True)
    )
    assert right.isfinite().all()
    assert not torch.allclose(wrong, right, **TOLERANCE)


def test_control_an_indexer_that_sees_its_own_tokens_only_differs() -> None:
    """The choice needs the keys of the other ranks' tokens in this step."""
    scenario, layout = SparseStep([30], [30]), NAMES["2, all keys"]
    shard = PrefillShard(rank=1, size=2)
    own = {p for s in shard.segments(0, 30) for p in range(s.first, s.last)}
    choice, _ = sparse(scenario, [True], layout)
    last = set(choice[22, 0].tolist())
    assert 22 in own
    assert last == set(scenario.best(22))
    assert last - own


def step_batch(lens: Steps, flags: list[bool] | None, size: int = 1) -> AttentionBatch:
    return sharded_batch(*lens, BLOCK, ContextShard(size=size), is_prefilling=flags)


def test_case_16_a_small_last_chunk_is_a_prefill() -> None:
    """vllm-ascend 10580: prompt 100, computed 98, scheduled 2, and 3 drafts: not a verification."""
    builder = AscendMlaPCPMetadataBuilder(
        BLOCK, prefill=PrefillShard(size=2), shares_keys=False, num_spec_tokens=DRAFTS
    )
    last_chunk = builder.build(step_batch(([2], [100]), [True])).pcp
    assert (last_chunk.num_replicated, last_chunk.num_split) == (0, (1, 1))
    drafts = builder.build(step_batch(([2], [100]), [False])).pcp
    assert (drafts.num_replicated, drafts.num_split) == (2, (0, 0))
    scenario = LatentScenario([2], [100])
    found = dense(scenario, [True], NAMES["2"])
    torch.testing.assert_close(found.double(), scenario.expected()[0], **TOLERANCE)


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("name", ["short", "mixed"])
def test_case_44_all_ranks_run_the_same_collectives(name: str, layout: str) -> None:
    """vllm-ascend 12036: also ranks without tokens in this step."""
    lens, flags, whole = STEPS[name][:2], STEPS[name][2], NAMES[layout]

    def calls(world: Any) -> list[list[str]]:
        ranks = thread_ranks(world, whole)
        latent_rank(LatentScenario(*lens), flags, whole, ranks)
        sparse_rank(SparseStep(*lens), flags, whole, ranks)
        return [ranks.tokens.calls, ranks.heads.calls]

    found = run_ranks(whole.size, calls)
    assert found[1:] == found[:1] * (whole.size - 1)


def test_case_49_requests_have_their_own_number_of_tokens() -> None:
    """vllm-ascend 8547: verification of 3, 0 and 2 drafts beside a prompt."""
    lens, flags = ([4, 1, 3, 9], [20, 5, 9, 12]), [False, False, False, True]
    for layout in ("2", "2, all keys"):
        scenario = LatentScenario(*lens)
        found = dense(scenario, flags, NAMES[layout])
        torch.testing.assert_close(found.double(), scenario.expected()[0], **TOLERANCE)
    builder = AscendMlaPCPMetadataBuilder(
        BLOCK, prefill=PrefillShard(rank=1, size=2), shares_keys=False, num_spec_tokens=DRAFTS
    )
    pcp = builder.build(step_batch(lens, flags)).pcp
    assert pcp.own_tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 14, 15, 16]
    assert (pcp.num_replicated, pcp.num_split) == (8, (3, 6))


@given(st.integers(0, 60), st.integers(1, 8))
def test_every_token_of_a_prefill_is_computed_by_one_rank(length: int, size: int) -> None:
    shards = [PrefillShard(rank=rank, size=size) for rank in range(size)]
    tokens = [
        [
            token
            for segment in shard.segments(7, length)
            for token in range(segment.first, segment.last)
        ]
        for shard in shards
    ]
    assert sorted(token for own in tokens for token in own) == list(range(length))
    assert all(own == sorted(own) for own in tokens)
    assert all(len(own) <= 2 * math.ceil(length / (2 * size)) for own in tokens)
    for shard in shards:
        assert all(segment.row == 7 for segment in shard.segments(7, length))


def test_early_and_late_tokens_balance() -> None:
    """8 chunks of 2 tokens; keys that the tokens of each rank see are equally many."""
    shards = [PrefillShard(rank=rank, size=4) for rank in range(4)]
    tokens = [
        [t for s in shard.segments(0, 16) for t in range(s.first, s.last)] for shard in shards
    ]
    assert tokens == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert {sum(token + 1 for token in own) for own in tokens} == {34}


@given(flagged(), st.integers(1, 4))
def test_orders_of_rows_fit_together(step: tuple[Steps, list[bool]], size: int) -> None:
    lens, flags = step
    batch = step_batch(lens, flags)
    rows = torch.arange(batch.num_tokens)
    gathered, own_rows = None, []
    for rank in range(size):
        builder = AscendMlaPCPMetadataBuilder(
            BLOCK, prefill=PrefillShard(rank=rank, size=size), shares_keys=False
        )
        metadata = builder.build(batch)
        pcp = metadata.pcp
        own = pcp.own_rows(rows)
        assert len(own) == metadata.num_own_tokens == pcp.num_own
        gathered = own[: pcp.num_replicated] if gathered is None else gathered
        own_rows.append(own[pcp.num_replicated :])
    assert torch.equal(pcp.step_order(torch.cat([gathered, *own_rows])), rows)
    assert torch.equal(pcp.step_order(metadata.slot_mapping), batch.slot_mapping)


@given(flagged())
def test_segments_are_requests_of_their_own(step: tuple[Steps, list[bool]]) -> None:
    """Lengths on host and device agree, and a segment has the keys up to its last token."""
    (lens, keys), flags = step
    builder = AscendMlaPCPMetadataBuilder(BLOCK, prefill=PrefillShard(size=2), shares_keys=False)
    batch = step_batch((lens, keys), flags)
    plan = builder.token_plan(batch)
    found = segment_batch(batch, plan.gathered)
    found.validate(BLOCK)
    for place, segment in enumerate(plan.gathered):
        before = keys[segment.row] - lens[segment.row]
        assert int(found.seq_lens[place]) == before + segment.last
        assert torch.equal(found.block_table[place], batch.block_table[segment.row])


def test_stale_query_starts_are_repaired() -> None:
    """A negative start, and padding behind the step: nothing moves."""
    clean = step_batch(([9, 0, 4], [30, 5, 12]), [True, False, False], size=2)
    stale = clean.padded(6, 16)
    starts = torch.tensor([0, 9, -1, 13, 13, 7, 99], dtype=torch.int32)
    stale = attrs.evolve(stale, query_start_loc=starts, query_start_loc_cpu=starts)
    for builder in (AscendMlaPCPMetadataBuilder, AscendSFAPCPMetadataBuilder):
        options = {"shard": ContextShard(size=2), "prefill": PrefillShard(size=2)}
        found, expected = (
            builder(BLOCK, **options, num_spec_tokens=DRAFTS).build(batch)
            for batch in (stale, clean)
        )
        assert torch.equal(found.pcp.own_tokens, expected.pcp.own_tokens)
        assert torch.equal(found.pcp.gathered_places, expected.pcp.gathered_places)
        assert torch.equal(found.slot_mapping, expected.slot_mapping)
        assert found.num_tokens == expected.num_tokens == 13


def test_sparse_builder_reads_no_key_length() -> None:
    """Key lengths may stay on the device; query lengths decide who computes what."""
    host = step_batch(([9, 4], [30, 12]), [True, False], size=2)
    batch = attrs.evolve(host, seq_lens=host.seq_lens.to("meta"), seq_lens_cpu=None)
    names = ("query_start_loc", "block_table", "slot_mapping")
    batch = attrs.evolve(batch, **{name: getattr(host, name).to("meta") for name in names})
    builder = AscendSFAPCPMetadataBuilder(
        BLOCK, shard=ContextShard(size=2), prefill=PrefillShard(size=2), num_spec_tokens=DRAFTS
    )
    metadata = builder.build(batch)
    assert metadata.num_tokens == 13
    assert metadata.num_own_tokens == 4 + 3


class TestRefusals:
    def test_several_tokens_of_unknown_kind(self) -> None:
        builder = AscendMlaPCPMetadataBuilder(
            BLOCK, prefill=PrefillShard(size=2), shares_keys=False
        )
        with pytest.raises(AttentionBatchError, match="is_prefilling: found None, while row 0"):
            builder.build(step_batch(([2], [9]), None))

    @pytest.mark.parametrize(
        ("shard", "prefill", "message"),
        [
            (ContextShard(size=3), PrefillShard(size=2), "size: found 3; allowed: a multiple of 2"),
            (
                ContextShard(rank=1, size=4),
                PrefillShard(rank=1, size=2),
                "rank: found 1; allowed: 2 to 3, of prefill rank 1",
            ),
        ],
    )
    def test_shares_that_do_not_fit_together(
        self, shard: ContextShard, prefill: PrefillShard, message: str
    ) -> None:
        for builder in (AscendMlaPCPMetadataBuilder, AscendSFAPCPMetadataBuilder):
            with pytest.raises(InvalidFieldError, match=message):
                builder(BLOCK, shard=shard, prefill=prefill)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"size": 0}, "size: found 0; allowed: at least 1"),
            ({"rank": 2}, "rank: found 2; allowed: 0 to 1"),
        ],
    )
    def test_impossible_shares_of_tokens(self, change: dict[str, int], message: str) -> None:
        with pytest.raises(InvalidFieldError, match=message):
            PrefillShard(**{"rank": 0, "size": 2, **change})

    def test_metadata_of_other_ranks_or_of_another_builder(self) -> None:
        batch = step_batch(([2], [9]), [True])
        prefill, alone = PrefillShard(rank=1, size=2), AscendMlaPCPImpl(4, SCALE)
        wrong = {
            "metadata.pcp.prefill: found rank 1 of 2; allowed: rank 0 of 1, as the group": (
                AscendMlaPCPMetadataBuilder(BLOCK, prefill=prefill, shares_keys=False)
            ),
            "metadata.dcp.shard: found rank 1 of 2; allowed: rank 0 of 1": (
                AscendMlaPCPMetadataBuilder(BLOCK, shard=ContextShard(rank=1, size=2))
            ),
            "metadata: found AscendMlaDCPMetadata; allowed: that of a PCP builder": (
                AscendMlaDCPMetadataBuilder(BLOCK)
            ),
        }
        rows = torch.zeros(2, 4, 512), torch.zeros(2, 4, 64)
        caches = LatentScenario([2], [9]).caches(1)
        for message, builder in wrong.items():
            step = LatentRankStep(
                q_nope=rows[0],
                q_pe=rows[1],
                latent=rows[0][:, 0],
                rope=rows[1][:, 0],
                latent_cache=caches[0],
                rope_cache=caches[1],
                metadata=builder.build(batch),
            )
            with pytest.raises(InvalidFieldError, match=message):
                alone.forward_mqa(step, torch.zeros(2, 4, 512))
