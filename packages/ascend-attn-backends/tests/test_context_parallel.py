"""Decode context parallelism of dense latent attention: any size gives the answer of one rank.

The other backends have such tests in test_cp_shared_keys.py, all of them run on gloo processes in
test_cp_gloo.py.

Public bug reports as small cases, in the order of the numbers in their names:

| row | report |
|----:|---|
| 10 | vllm-ascend 12840, 13779: negative length of a padding row that owns tokens |
| 11 | vllm-ascend 14024: slots of the drafts were left out |
| 18 | vllm-ascend 11849: a query's own key was not counted on its owner |
| 35 | vllm 28181, 39148: NaN when both parts are empty |
| 37 | vllm 49294: rows without keys came back with a finite lse (also in test_mla.py) |
| 38 | vllm 38416, 50484, flashinfer 4484: ranks without keys |
| 49 | vllm-ascend 8547: equal numbers of tokens per request were assumed |
"""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from attn_backends_support import TOLERANCES, steps
from dcp_support import STEPS, PoisonedDCPImpl, batch_on, rank_step, run_shards, run_steps
from hypothesis import given
from hypothesis import strategies as st
from latent_support import SCALE, LatentScenario

from ascend_attn_backends import (
    PAD_SLOT,
    AscendMlaDCPBackend,
    AscendMlaDCPImpl,
    AscendMlaDCPMetadataBuilder,
    AscendMLAImpl,
    AscendMLAMetadataBuilder,
    AttentionBatchError,
    BackendRequest,
    ContextShard,
    InvalidFieldError,
    merge_shards,
    per_token_batch,
    select_backend,
    sharded_batch,
)
from ascend_attn_ops import OpArgumentError, PartialAttention, merge_partials, use_profile
from ascend_hwprofile import profile_for

TOLERANCE = TOLERANCES[torch.float32]
SIZES = [1, 2, 4]
INTERLEAVES = [1, 2, 3, 16, 20]


def shards(size: int, interleave: int = 1) -> list[ContextShard]:
    return [ContextShard(rank=rank, size=size, interleave=interleave) for rank in range(size)]


@given(
    st.lists(st.integers(-3, 90), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(1, 20),
)
def test_local_counts_are_those_of_the_definition(
    lengths: list[int], size: int, interleave: int
) -> None:
    for shard in shards(size, interleave):
        owned = [
            sum(1 for p in range(length) if p // interleave % size == shard.rank)
            for length in lengths
        ]
        assert shard.local_counts(torch.tensor(lengths)).tolist() == owned
    whole = shard.counts_on_all_ranks(torch.tensor(lengths))
    assert whole.sum(-1).tolist() == [max(length, 0) for length in lengths]
    assert whole.dtype == torch.int64
    assert (whole >= 0).all()


@given(
    steps(max_computed=90),
    st.integers(1, 8),
    st.sampled_from(INTERLEAVES),
    st.sampled_from([16, 128]),
)
def test_every_token_has_one_slot_on_one_rank(
    step: tuple[list[int], list[int]], size: int, interleave: int, block_size: int
) -> None:
    """Read back in the order of a rank's blocks, the slots are its positions in order."""
    query_lens, seq_lens = step
    written = []
    for shard in shards(size, interleave):
        whole = sharded_batch(seq_lens, seq_lens, block_size, shard)
        step_slots = sharded_batch(
            query_lens, seq_lens, block_size, shard, block_table=whole.block_table
        ).slot_mapping
        cache = torch.full((int(whole.block_table.max() + 1) * block_size,), -1)
        start, kept = 0, []
        for row, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
            slots = whole.slot_mapping[start : start + length]
            kept.append(slots[length - new :])
            positions = torch.arange(length)[slots >= 0]
            cache[slots[slots >= 0]] = positions
            own = cache.view(-1, block_size)[whole.block_table[row].long()].flatten()
            assert own[: len(positions)].tolist() == positions.tolist()
            start += length
        assert torch.equal(step_slots, torch.cat(kept))
        written.append(step_slots >= 0)
        assert (step_slots[step_slots < 0] == PAD_SLOT).all()
    assert (torch.stack(written).sum(0) == 1).all()


@given(
    steps(),
    st.sampled_from(SIZES),
    st.sampled_from(INTERLEAVES),
    st.sampled_from([16, 128]),
    st.sampled_from(["causal", "none", "first alone"]),
    st.integers(0, 99),
)
def test_any_size_equals_the_formula(
    step: tuple[list[int], list[int]],
    size: int,
    interleave: int,
    block_size: int,
    causal: str,
    seed: int,
) -> None:
    flags = {
        "causal": True,
        "none": False,
        "first alone": [True, *[False] * (len(step[0]) - 1)],
    }[causal]
    scenario = LatentScenario(*step, block_size=block_size, causal=flags, seed=seed)
    output = run_shards(scenario, size, interleave)
    torch.testing.assert_close(output.double(), scenario.expected()[0], **TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", STEPS)
def test_named_steps(name: str, size: int) -> None:
    scenario = LatentScenario(*STEPS[name])
    torch.testing.assert_close(
        run_shards(scenario, size).double(), scenario.expected()[0], **TOLERANCE
    )


@given(
    steps(),
    st.sampled_from(SIZES),
    st.sampled_from(INTERLEAVES),
    st.booleans(),
    st.integers(0, 2),
)
def test_an_engine_that_merges_by_itself_gets_the_parts(
    step: tuple[list[int], list[int]], size: int, interleave: int, causal: bool, padding: int
) -> None:
    flags = [causal, *[True] * (len(step[0]) - 1)]
    scenario, parts = LatentScenario(*step, causal=flags), []
    impl = AscendMLAImpl(scenario.heads, SCALE)
    for shard in shards(size, interleave):
        batch = batch_on(scenario, shard)
        batch = batch.padded(batch.num_rows + padding, batch.num_token_rows + padding)
        caches = rank_step(scenario, shard)
        tokens = per_token_batch(batch, shard)
        metadata = AscendMLAMetadataBuilder(scenario.block_size).build(tokens)
        assert torch.equal(metadata.slot_mapping, batch.slot_mapping)
        arguments = (caches.latent_cache, caches.rope_cache, metadata)
        parts.append(impl.forward_mqa_partial(scenario.q_nope, scenario.q_pe, *arguments))
    merged, (out, lse) = merge_partials(parts), scenario.expected()
    torch.testing.assert_close(merged.out.double(), out, **TOLERANCE)
    torch.testing.assert_close(merged.lse.double(), lse, **TOLERANCE)


@pytest.mark.parametrize("k", range(1, 9))
def test_verification_of_k_drafts(k: int) -> None:
    scenario = LatentScenario([k + 1, k + 1, 1], [k + 1, 30, 7])
    torch.testing.assert_close(
        run_shards(scenario, 4, 2).double(), scenario.expected()[0], **TOLERANCE
    )


def test_half_precision_keeps_the_tolerance_of_the_operator() -> None:
    scenario = LatentScenario(*STEPS["mixed"], dtype=torch.bfloat16)
    torch.testing.assert_close(
        run_shards(scenario, 4).double(), scenario.expected()[0], **TOLERANCES[torch.bfloat16]
    )


def test_control_another_interleave_when_writing_differs() -> None:
    scenario = LatentScenario([1], [38])  # 20 and 18 keys of two in a row, 19 and 19 of one
    pairs = zip(shards(2, 2), shards(2, 1), strict=True)
    found = run_steps(scenario, [rank_step(scenario, read, written=w) for read, w in pairs])
    assert not torch.allclose(found.double(), scenario.expected()[0], **TOLERANCE)


def test_control_without_the_lse_the_merge_differs() -> None:
    scenario = LatentScenario([1], [37])
    impl, parts = AscendMlaDCPImpl(4, SCALE), []
    for shard in shards(2):
        step = rank_step(scenario, shard)
        parts.append(impl.over_cache((scenario.q_nope, scenario.q_pe), step))
    merged = torch.cat([merge_shards(parts, rank).out for rank in range(2)], 1)
    torch.testing.assert_close(merged.double(), scenario.expected()[0], **TOLERANCE)
    mean = (parts[0].out + parts[1].out) / 2
    assert not torch.allclose(mean.double(), scenario.expected()[0], **TOLERANCE)


def test_case_10_padding_rows_have_no_negative_lengths() -> None:
    """vllm-ascend 12840, 13779: a padding row without keys that owns tokens got length -2.

    9 requests of 4 tokens, padded to 80 tokens with rows that count as requests.
    """
    lens = torch.tensor([4] * 20, dtype=torch.int32)
    keys = torch.tensor([30] * 9 + [0] * 11, dtype=torch.int32)
    real = sharded_batch([4] * 20, [30] * 20, 16, ContextShard(size=8))
    batch = attrs.evolve(real, seq_lens=keys, seq_lens_cpu=keys)
    for shard in shards(8):
        metadata = AscendMlaDCPMetadataBuilder(16, shard=shard).build(batch)
        counts = torch.tensor(metadata.dcp.num_computed_tokens_of_dcp)
        assert (counts >= 0).all()
        assert counts.sum(1).tolist() == list(metadata.dcp.cached_lens) == [26] * 9 + [0] * 11
        assert metadata.dcp.local_cached_lens[9:] == (0,) * 11
        assert int(lens.sum()) == metadata.num_tokens == 80


def test_case_11_slots_cover_the_drafts_of_every_request() -> None:
    """vllm-ascend 14024: 110 slots into a buffer of 104; it left out the drafts' tokens."""
    scheduled = [6] * 4 + [7] * 8  # 80 tokens; k = 5 adds 4 drafts to each of 12 requests
    query_lens = [length + 4 for length in scheduled]
    for shard in shards(4):
        batch = sharded_batch(query_lens, [n + 20 for n in query_lens], 16, shard)
        metadata = AscendMlaDCPMetadataBuilder(16, shard=shard).build(batch)
        assert len(metadata.slot_mapping) == batch.num_token_rows == 80 + 4 * 12


@pytest.mark.parametrize("position", [0, 1, 5])
def test_case_18_a_query_sees_its_own_key_on_its_owner(position: int) -> None:
    """vllm-ascend 11849: local keys were counted up to the query's position, without itself."""
    length = torch.tensor([position + 1])
    counts = [int(shard.local_counts(length)) for shard in shards(2)]
    assert counts == [position // 2 + 1, (position + 1) // 2]
    scenario = LatentScenario([1], [position + 1])
    torch.testing.assert_close(
        run_shards(scenario, 2).double(), scenario.expected()[0], **TOLERANCE
    )


def test_case_35_two_empty_parts_stay_empty() -> None:
    """vllm 28181, 39148: -inf minus -inf."""
    empty = PartialAttention(torch.zeros(3, 4, 512), torch.full((3, 4), -math.inf))
    merged = merge_shards([empty, empty], 1)
    assert torch.equal(merged.out, torch.zeros(3, 2, 512))
    assert merged.lse.isneginf().all()
    scenario = LatentScenario([2, 1], [2, 5])
    keys = torch.tensor([0, 5], dtype=torch.int32)
    found = []
    for shard in shards(2):
        batch = attrs.evolve(batch_on(scenario, shard), seq_lens=keys, seq_lens_cpu=keys)
        batch = attrs.evolve(batch, causal=False)  # no split: the cache alone is read
        found.append(rank_step(scenario, shard, batch))
    output = run_steps(scenario, found)
    assert torch.equal(output[:2], torch.zeros(2, 4, 512))
    alone = attrs.evolve(scenario, causal=False).expected()[0][2:]
    torch.testing.assert_close(output[2:].double(), alone, **TOLERANCE)


def test_case_37_a_rank_without_keys_is_neutral_whatever_the_operator_wrote() -> None:
    """vllm 49294: empty rows came back with a finite lse; the length decides."""
    scenario = LatentScenario([1, 1, 4], [1, 6, 5])
    found = [rank_step(scenario, shard) for shard in shards(4)]
    output = run_steps(scenario, found, PoisonedDCPImpl)
    torch.testing.assert_close(output.double(), scenario.expected()[0], **TOLERANCE)


@pytest.mark.parametrize("interleave", [1, 4])
def test_case_38_ranks_without_keys_are_neutral(interleave: int) -> None:
    """vllm 38416, 50484, flashinfer 4484: short requests were wrong under four ranks."""
    scenario = LatentScenario([1, 1], [2, 9])
    counts = [
        rank_step(scenario, shard).metadata.dcp.local_cached_lens for shard in shards(4, interleave)
    ]
    assert (0, 2) in counts or (0, 0) in counts
    found = run_shards(scenario, 4, interleave)
    torch.testing.assert_close(found, run_shards(scenario, 1), **TOLERANCE)
    torch.testing.assert_close(found.double(), scenario.expected()[0], **TOLERANCE)


def test_case_49_requests_have_their_own_number_of_tokens() -> None:
    """vllm-ascend 8547: slots were computed as if all requests had equally many."""
    scenario = LatentScenario([4, 1, 3], [20, 5, 9])
    for shard in shards(2):
        positions = torch.tensor([16, 17, 18, 19, 4, 6, 7, 8])
        rows = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])
        batch = batch_on(scenario, shard)
        blocks = batch.block_table[rows, positions // 2 // 16]
        expected = torch.where(
            positions % 2 == shard.rank, blocks * 16 + positions // 2 % 16, PAD_SLOT
        )
        assert torch.equal(batch.slot_mapping, expected)
    torch.testing.assert_close(
        run_shards(scenario, 2).double(), scenario.expected()[0], **TOLERANCE
    )


def test_padding_rows_and_tokens() -> None:
    scenario = LatentScenario(*STEPS["mixed"])
    found = []
    for shard in shards(2):
        batch = batch_on(scenario, shard)
        padded = batch.padded(batch.num_rows + 3, batch.num_token_rows + 5)
        found.append(rank_step(scenario, shard, padded))
    output = run_steps(scenario, found)
    torch.testing.assert_close(output[:-5].double(), scenario.expected()[0], **TOLERANCE)
    assert torch.equal(output[-5:], torch.zeros(5, 4, 512))


def test_all_ranks_agree_on_exchanging() -> None:
    """A rank without keys takes part; a step without cached keys exchanges on no rank."""
    decode, prefill = LatentScenario([1], [1]), LatentScenario([5, 2], [5, 2])
    assert [rank_step(decode, s).metadata.dcp.exchanges for s in shards(4)] == [True] * 4
    assert [rank_step(prefill, s).metadata.dcp.exchanges for s in shards(4)] == [False] * 4


@pytest.mark.parametrize("flags", [True, [True, False]])
def test_a_step_without_tokens_exchanges_nothing(flags: bool | list[bool]) -> None:
    scenario = LatentScenario([0, 0], [5, 3], causal=flags)
    found = [rank_step(scenario, shard) for shard in shards(2)]
    assert not any(step.metadata.dcp.exchanges for step in found)
    assert run_steps(scenario, found).shape == (0, 4, 512)


def test_building_reads_nothing_from_the_device_and_aliases_nothing() -> None:
    scenario, shard = LatentScenario(*STEPS["mixed"]), ContextShard(rank=1, size=2)
    batch = batch_on(scenario, shard)
    builder = AscendMlaDCPMetadataBuilder(16, shard=shard)
    expected = builder.build(batch)
    zeros = {n: torch.zeros_like(getattr(batch, n)) for n in ("query_start_loc", "seq_lens")}
    found = builder.build(attrs.evolve(batch, **zeros))
    assert found.dcp == expected.dcp
    table, slots = found.launches[0].block_table.clone(), found.slot_mapping.clone()
    batch.block_table.fill_(7)
    batch.slot_mapping.fill_(7)
    assert torch.equal(found.launches[0].block_table, table)
    assert torch.equal(found.slot_mapping, slots)


def test_a_block_row_that_is_too_narrow_for_the_rank_is_named() -> None:
    shard = ContextShard(size=2)
    batch = sharded_batch([1], [70], 16, shard)
    with pytest.raises(AttentionBatchError, match="2 columns; allowed: at least 3, for 35 keys"):
        AscendMlaDCPMetadataBuilder(16, shard=shard).build(
            attrs.evolve(batch, block_table=batch.block_table[:, :2])
        )
    with pytest.raises(InvalidFieldError, match="positions"):
        sharded_batch(
            [1], [70], 16, ContextShard(rank=1, size=2), block_table=batch.block_table[:, :2]
        )


def test_metadata_of_another_rank_is_refused() -> None:
    scenario = LatentScenario([1], [5])
    step = rank_step(scenario, ContextShard(rank=1, size=2))
    with pytest.raises(InvalidFieldError, match=r"rank 1 of 2; allowed: rank 0 of 1"):
        AscendMlaDCPImpl(2, SCALE).forward_mqa(step, torch.empty_like(step.q_nope))


def test_one_rank_needs_no_group() -> None:
    scenario = LatentScenario(*STEPS["mixed"])
    step, output = rank_step(scenario, ContextShard()), torch.full_like(scenario.q_nope, math.nan)
    assert AscendMlaDCPImpl(4, SCALE).forward_mqa(step, output) is output
    torch.testing.assert_close(output.double(), scenario.expected()[0], **TOLERANCE)


@pytest.mark.parametrize(
    ("change", "name"), [({"rank": 2}, "rank"), ({"size": 0}, "size"), ({"interleave": 0}, "inter")]
)
def test_impossible_shards_are_named(change: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ContextShard(**{"rank": 0, "size": 2, **change})


@pytest.mark.parametrize(("heads", "rank"), [(3, 0), (4, 2), (4, -1)])
def test_impossible_merges_are_named(heads: int, rank: int) -> None:
    part = PartialAttention(torch.zeros(1, heads, 8), torch.zeros(1, heads))
    with pytest.raises(InvalidFieldError, match=r"heads|rank"):
        merge_shards([part, part], rank)


DEEPSEEK = BackendRequest(
    use_mla=True,
    head_size=576,
    num_heads=32,
    num_kv_heads=1,
    dtype=torch.bfloat16,
    context_parallel_size=4,
)


@pytest.mark.parametrize("family", ["A2", "A3", "A5"])
def test_selection_and_calls_on_products(family: str) -> None:
    selection = select_backend(DEEPSEEK, profile_for(family))
    assert selection.backend == "mla_dcp"
    assert (
        select_backend(attrs.evolve(DEEPSEEK, context_parallel_size=1), profile_for(family)).backend
        == "mla"
    )
    scenario = LatentScenario(*STEPS["mixed"], dtype=torch.bfloat16)
    with use_profile(profile_for(family)):
        output = run_shards(scenario, 2)
    torch.testing.assert_close(
        output.double(), scenario.expected()[0], **TOLERANCES[torch.bfloat16]
    )


def test_control_gathered_heads_that_the_operator_lacks_are_refused() -> None:
    request = attrs.evolve(DEEPSEEK, num_heads=16, context_parallel_size=3)
    refusals = AscendMlaDCPBackend.refusals(request, profile_for("A2"))
    assert [entry.rule for entry in refusals] == ["fused_infer_attention_score.mla_heads"]
    assert "N 48" in refusals[0].found
    scenario = LatentScenario([1], [9], heads=6, dtype=torch.bfloat16)
    with use_profile(profile_for("A2")), pytest.raises(OpArgumentError, match="mla_heads"):
        run_shards(scenario, 2)


REFUSED = {
    "mla_dcp.context_parallel_size": {"context_parallel_size": 1},
    "mla_dcp.prefill_context_parallel_size": {"prefill_context_parallel_size": 2},
    "mla_dcp.use_sparse": {"use_sparse": True},
    "mla_dcp.kv_cache_dtype": {"kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_it_refuses(rule: str) -> None:
    request = attrs.evolve(DEEPSEEK, **REFUSED[rule])
    refusals = AscendMlaDCPBackend.refusals(request, profile_for("A3"))
    assert rule in {entry.rule for entry in refusals}


def test_310p_has_no_operator_for_it() -> None:
    refusals = AscendMlaDCPBackend.refusals(DEEPSEEK, profile_for("310P"))
    assert [entry.rule for entry in refusals] == ["mla_dcp.capability"]
