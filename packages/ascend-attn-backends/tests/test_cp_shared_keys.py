"""Decode context parallelism of the standard, sparse and compressed backends.

Any number of ranks gives the answer of one: for grouped-query attention and sparse latent attention
that of the float64 formula, for compressed attention that of the plain backend, which equals
Hugging Face's module (here too, in test_cp_hugging_face.py). Dense latent attention has the same
tests in test_context_parallel.py. Public bug reports, in the order of their numbers:

| row | report |
|----:|---|
| 10 | vllm-ascend 12840, 13779: negative length of a padding row that owns tokens |
| 18 | vllm-ascend 11849: a query's own key was not counted on its owner |
| 38 | vllm 38416, 50484, flashinfer 4484: ranks without keys |
| 44 | vllm-ascend 12036: ranks ran different numbers of steps |
| 49 | vllm-ascend 8547: equal numbers of tokens per request were assumed |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from attn_backends_support import TOLERANCES, Scenario, steps
from cp_support import (
    BLOCK,
    SHARED_KEYS,
    STEPS,
    ChangedGroup,
    Layout,
    Ranks,
    batches,
    compare_sparse,
    finite_lse,
    joined,
    latent_rank,
    layouts,
    lost_shard,
    on_ranks,
    sparse_rank,
    standard_rank,
)
from dsa_steps import KINDS, CompressedStep
from hypothesis import given
from hypothesis import strategies as st
from latent_support import LatentScenario
from sparse_oracle import SparseStep

from ascend_attn_backends import (
    AscendAttentionDCPMetadataBuilder,
    AscendSFADCPMetadataBuilder,
    ContextShard,
    per_token_batch,
    run_ranks,
)
from ascend_attn_ops import sanitize

TOLERANCE = TOLERANCES[torch.float32]
TWO, FOUR = Layout(heads=2), Layout(heads=4)


def grouped(step: Scenario, layout: Layout, **options: Any) -> torch.Tensor:
    return joined(
        on_ranks(layout, lambda ranks: standard_rank(step, layout, ranks, **options)), layout
    )


def sparse(step: SparseStep, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    found = on_ranks(layout, lambda ranks: sparse_rank(step, [], layout, ranks))
    for choice, _ in found[1:]:
        assert torch.equal(choice, found[0][0])
    return found[0][0], joined([output for _, output in found], layout)


def compressed(step: CompressedStep, layout: Layout) -> torch.Tensor:
    return joined(on_ranks(layout, lambda ranks: step.on_rank(layout, ranks)), layout)


@given(
    steps(),
    layouts(SHARED_KEYS),
    st.sampled_from([(4, 1), (4, 4), (8, 2)]),
    st.sampled_from(["causal", "none", "first alone"]),
    st.integers(0, 99),
)
def test_grouped_query_attention_of_any_size(
    step: tuple[list[int], list[int]],
    layout: Layout,
    heads: tuple[int, int],
    causal: str,
    seed: int,
) -> None:
    flags = {"causal": True, "none": False, "first alone": [True, *[False] * (len(step[0]) - 1)]}
    scenario = Scenario(*step, heads=heads[0], kv_heads=heads[1], causal=flags[causal], seed=seed)
    scenario.compare(grouped(scenario, layout))


@given(steps(max_query=6), layouts(SHARED_KEYS), st.booleans(), st.integers(0, 99))
def test_sparse_attention_of_any_size(
    step: tuple[list[int], list[int]], layout: Layout, causal: bool, seed: int
) -> None:
    """The choice is that of one rank, and so is the output."""
    scenario = SparseStep(*step, causal=causal, seed=seed)
    compare_sparse(scenario, *sparse(scenario, layout), TOLERANCE)


@given(steps(max_reqs=3), layouts(SHARED_KEYS), st.sampled_from(sorted(KINDS)), st.integers(0, 99))
def test_compressed_attention_of_any_size(
    step: tuple[list[int], list[int]], layout: Layout, kind: str, seed: int
) -> None:
    scenario = CompressedStep(*step, kind, seed=seed)
    torch.testing.assert_close(compressed(scenario, layout), scenario.plain(), **TOLERANCE)


@pytest.mark.parametrize("layout", SHARED_KEYS[1:], ids=lambda layout: str(layout.size))
@pytest.mark.parametrize("name", STEPS)
def test_named_steps(name: str, layout: Layout) -> None:
    lens = STEPS[name][:2]
    Scenario(*lens).compare(grouped(Scenario(*lens), layout))
    scenario = SparseStep(*lens)
    compare_sparse(scenario, *sparse(scenario, layout), TOLERANCE)
    for kind in KINDS:
        whole = CompressedStep(*lens, kind)
        torch.testing.assert_close(compressed(whole, layout), whole.plain(), **TOLERANCE)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_verification_of_k_drafts(k: int) -> None:
    lens = ([k + 1, k + 1, 1], [k + 1, 30, 7])
    Scenario(*lens).compare(grouped(Scenario(*lens), FOUR))
    compare_sparse(SparseStep(*lens), *sparse(SparseStep(*lens), FOUR), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_tolerance_of_the_operators(dtype: torch.dtype) -> None:
    lens = STEPS["mixed"][:2]
    Scenario(*lens, dtype=dtype).compare(grouped(Scenario(*lens, dtype=dtype), FOUR))
    scenario = SparseStep(*lens, dtype=dtype)
    compare_sparse(scenario, *sparse(scenario, FOUR), TOLERANCES[dtype])


def test_operators_see_sane_values_on_every_rank() -> None:
    """The sanitizer checks lengths, prefix sums, blocks and plans of every call."""
    lens, flags = STEPS["mixed"][:2], STEPS["mixed"][2]
    with sanitize():
        Scenario(*lens).compare(grouped(Scenario(*lens), FOUR))
        compare_sparse(SparseStep(*lens), *sparse(SparseStep(*lens), FOUR), TOLERANCE)
        for kind in KINDS:
            whole = CompressedStep(*lens, kind)
            torch.testing.assert_close(compressed(whole, FOUR), whole.plain(), **TOLERANCE)
        dense = LatentScenario(*lens)
        found = joined(on_ranks(FOUR, lambda ranks: latent_rank(dense, flags, FOUR, ranks)), FOUR)
        torch.testing.assert_close(found.double(), dense.expected()[0], **TOLERANCE)


def dense_latent(step: LatentScenario, layout: Layout) -> torch.Tensor:
    flags = [False] * len(step.seq_lens)
    return joined(on_ranks(layout, lambda ranks: latent_rank(step, flags, layout, ranks)), layout)


# A decode, so that every key is read from the caches. Of 38 keys two ranks have 19 and 19 one by
# one, but 20 and 18 two by two; of 14 compressed keys 7 and 7, but 8 and 6.
LONG = ([1], [38])
READ = {
    "standard": (lambda layout: grouped(Scenario(*LONG), layout), Scenario(*LONG).expected),
    "mla": (
        lambda layout: dense_latent(LatentScenario(*LONG), layout),
        lambda: LatentScenario(*LONG).expected()[0],
    ),
    "sfa": (
        lambda layout: sparse(SparseStep(*LONG), layout)[1],
        lambda: SparseStep(*LONG).attention(0, SparseStep(*LONG).best(0))[0][None],
    ),
    "dsa": (
        lambda layout: compressed(CompressedStep([1], [114], "all"), layout),
        CompressedStep([1], [114], "all").plain,
    ),
}


@pytest.mark.parametrize("backend", READ)
def test_control_an_owner_of_another_interleave_differs(backend: str) -> None:
    """Keys are written by one rule of ownership and read by another one."""
    run, expected = READ[backend]
    torch.testing.assert_close(run(TWO).double(), expected().double(), **TOLERANCE)
    wrong = run(attrs.evolve(TWO, interleave=2, read_interleave=1))
    assert not torch.allclose(wrong.double(), expected().double(), **TOLERANCE)


@pytest.mark.parametrize("change", [lost_shard, finite_lse])
@pytest.mark.parametrize("backend", ["standard", "mla", "sfa", "dsa"])
def test_control_a_wrong_merge_differs(
    backend: str, change: Callable[[int, torch.Tensor], torch.Tensor]
) -> None:
    """A shard that is dropped, and a shard without keys whose lse is finite."""
    lengths = 3 if change is finite_lse else 38  # of four ranks one has no key, or all have some
    made = {
        "standard": Scenario([1], [lengths]),
        "mla": LatentScenario([1], [lengths]),
        "sfa": SparseStep([1], [lengths]),
        "dsa": CompressedStep([1], [lengths * 8], "all"),
    }[backend]

    def body(ranks: Ranks, *, broken: bool) -> torch.Tensor:
        if broken:
            ranks = attrs.evolve(ranks, heads=ChangedGroup(ranks.heads, change))
        if isinstance(made, CompressedStep):
            return made.on_rank(FOUR, ranks)
        if isinstance(made, SparseStep):
            return sparse_rank(made, [], FOUR, ranks)[1]
        if isinstance(made, LatentScenario):
            return latent_rank(made, [False], FOUR, ranks)
        return standard_rank(made, FOUR, ranks)

    right = joined(on_ranks(FOUR, lambda ranks: body(ranks, broken=False)), FOUR)
    wrong = joined(on_ranks(FOUR, lambda ranks: body(ranks, broken=True)), FOUR)
    assert right.isfinite().all()
    assert not torch.allclose(wrong, right, **TOLERANCE)


def test_control_a_choice_from_one_rank_differs() -> None:
    """The best keys of a rank are not the best of all."""
    scenario, shard = SparseStep([1], [38]), TWO.shard(0)
    alone = scenario.best(0)
    own = [position for position in alone if position % 2 == shard.rank]
    assert 0 < len(own) < len(alone)
    choice, _ = sparse(scenario, TWO)
    assert sorted(choice[0, 0].tolist()) == sorted(alone)


def test_case_10_padding_rows_have_no_negative_lengths() -> None:
    """vllm-ascend 12840, 13779: 9 requests of 4 tokens, and rows without keys that own tokens."""
    keys = torch.tensor([30] * 9 + [0] * 11, dtype=torch.int32)
    total = torch.zeros(80, dtype=torch.int32)
    for rank, batch in enumerate(batches([4] * 20, [30] * 20, 8)):
        stale = attrs.evolve(batch, seq_lens=keys, seq_lens_cpu=keys)
        shard = ContextShard(rank=rank, size=8)
        found = AscendAttentionDCPMetadataBuilder(BLOCK, shard=shard).build(stale)
        assert min(found.launches[0].seq_lens) == 0
        assert found.dcp.local_cached_lens[9:] == (0,) * 11
        lengths = AscendSFADCPMetadataBuilder(BLOCK, shard=shard).build(stale).seq_lens
        assert (lengths >= 0).all()
        total += lengths
    assert total[36:].tolist() == [0] * 44
    assert total[:36].tolist() == [27, 28, 29, 30] * 9


@pytest.mark.parametrize("position", [0, 1, 5])
def test_case_18_a_query_sees_its_own_key_on_its_owner(position: int) -> None:
    """vllm-ascend 11849: local keys were counted up to the query's position, without itself."""
    lens = ([1], [position + 1])
    for rank, batch in enumerate(batches(*lens, 2)):
        tokens = per_token_batch(batch, ContextShard(rank=rank, size=2))
        owned = [p for p in range(position + 1) if p % 2 == rank]
        assert tokens.seq_lens.tolist() == tokens.seq_lens_cpu.tolist() == [len(owned)]
    Scenario(*lens).compare(grouped(Scenario(*lens), TWO))
    compare_sparse(SparseStep(*lens), *sparse(SparseStep(*lens), TWO), TOLERANCE)


@pytest.mark.parametrize("interleave", [1, 4])
def test_case_38_ranks_without_keys_are_neutral(interleave: int) -> None:
    """vllm 38416, 50484, flashinfer 4484: short requests were wrong under four ranks."""
    lens, layout = ([1, 1], [2, 9]), attrs.evolve(FOUR, interleave=interleave)
    Scenario(*lens).compare(grouped(Scenario(*lens), layout))
    compare_sparse(SparseStep(*lens), *sparse(SparseStep(*lens), layout), TOLERANCE)
    whole = CompressedStep([1, 1], [3, 9], "all")  # no compressed key at all, and one
    torch.testing.assert_close(compressed(whole, layout), whole.plain(), **TOLERANCE)


@pytest.mark.parametrize("name", ["short", "mixed"])
def test_case_44_all_ranks_run_the_same_collectives(name: str) -> None:
    """vllm-ascend 12036: one data-parallel rank ran its draft steps, the other a copy of none."""
    lens = STEPS[name][:2]

    def calls(group: Any) -> tuple[list[str], ...]:
        ranks = Ranks(group.rank, group.subgroup([group.rank]), group)
        counts = []
        for run in (
            lambda: standard_rank(Scenario(*lens), FOUR, ranks),
            lambda: sparse_rank(SparseStep(*lens), [], FOUR, ranks),
            lambda: CompressedStep(*lens, "chosen").on_rank(FOUR, ranks),
        ):
            before = len(group.calls)
            run()
            counts.append(group.calls[before:])
        return tuple(counts)

    found = run_ranks(4, calls)
    assert found[1:] == found[:1] * 3
    assert found[0][1] == ["all_gather", "all_gather", "all_to_all"]


def test_case_49_requests_have_their_own_number_of_tokens() -> None:
    """vllm-ascend 8547: slots were computed as if all requests had equally many."""
    lens = ([4, 1, 3], [20, 5, 9])
    for rank, batch in enumerate(batches(*lens, 2)):
        metadata = AscendSFADCPMetadataBuilder(BLOCK, shard=ContextShard(rank=rank, size=2)).build(
            batch
        )
        seen = [17, 18, 19, 20, 5, 7, 8, 9]
        own = [sum(1 for p in range(count) if p % 2 == rank) for count in seen]
        assert metadata.seq_lens.tolist() == own
    Scenario(*lens).compare(grouped(Scenario(*lens), TWO))
    compare_sparse(SparseStep(*lens), *sparse(SparseStep(*lens), TWO), TOLERANCE)


def test_padding_rows_and_tokens() -> None:
    scenario = Scenario(*STEPS["mixed"][:2])
    output = grouped(scenario, TWO, padding=3)
    scenario.compare(output)
    assert torch.equal(output[-3:], torch.zeros(3, 4, 16))


def test_a_step_without_tokens_exchanges_nothing() -> None:
    lens = ([0, 0], [5, 3])
    assert grouped(Scenario(*lens), TWO).shape == (0, 4, 16)
    choice, output = sparse(SparseStep(*lens), TWO)
    assert choice.shape == (0, 1, 8)
    assert output.shape == (0, 4, 512)
    assert compressed(CompressedStep([0, 0], [5, 3], "chosen"), TWO).shape == (0, 4, 32)


def test_lse_marks_are_what_the_controls_change() -> None:
    """``finite_lse`` changes an empty shard and nothing else."""
    rows = torch.tensor([[1.0, -math.inf], [2.0, 0.5]])
    assert finite_lse(0, rows).tolist() == [[1.0, 0.0], [2.0, 0.5]]
    assert lost_shard(1, rows)[:, -1].isneginf().all()
    assert lost_shard(0, rows) is rows
