"""Sparse latent attention and its indexer against float64 formulas, on any step."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from attn_backends_support import steps
from hypothesis import given
from hypothesis import strategies as st
from sparse_oracle import SparseStep

from ascend_attn_backends import (
    AscendAttentionMetadataBuilder,
    AscendSFAIndexerMetadataBuilder,
    AscendSFAMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    InvalidFieldError,
)
from ascend_attn_ops import PartialAttention, use_provider
from ascend_attn_ops import merge_partials as merge

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def check(step: SparseStep, chosen: torch.Tensor, output: torch.Tensor) -> None:
    for token, (_, limit) in enumerate(step.seen()):
        row = chosen[token, 0].tolist()
        count = min(limit, step.top_k)
        assert row == step.best(token) + [-1] * (step.top_k - count)
        expected, _ = step.attention(token, row[:count])
        torch.testing.assert_close(output[token].double(), expected, **TOLERANCE)


@given(
    steps(max_reqs=4, max_computed=50),
    st.sampled_from([16, 128]),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_step(
    step: tuple[list[int], list[int]], block_size: int, top_k: int, causal: bool, seed: int
) -> None:
    scenario = SparseStep(*step, block_size=block_size, top_k=top_k, causal=causal, seed=seed)
    check(scenario, *scenario.run())


@given(steps(max_reqs=3), st.integers(0, 3), st.integers(0, 5))
def test_padding_changes_nothing_and_writes_nothing(
    step: tuple[list[int], list[int]], rows: int, tokens: int
) -> None:
    scenario, twin = SparseStep(*step), SparseStep(*step)
    batch = scenario.batch()
    wide = batch.padded(batch.num_rows + rows, batch.num_token_rows + tokens)
    chosen, output = scenario.run(wide)
    alone = twin.run()
    assert torch.equal(chosen, alone[0])
    assert torch.equal(output[: batch.num_tokens], alone[1])
    assert not output[batch.num_tokens :].any()
    for name, cache in scenario.caches.items():
        assert torch.equal(cache.nan_to_num(7.0), twin.caches[name].nan_to_num(7.0))


@pytest.mark.parametrize("provider", ["cpu", "reference"])
@pytest.mark.parametrize("one_tensor", [False, True])
@pytest.mark.parametrize("kernel", [None, 16, 32])
def test_kernel_blocks_strides_and_providers(
    kernel: int | None, one_tensor: bool, provider: str
) -> None:
    step = SparseStep(
        [3, 1, 6], [140, 61, 6], block_size=64, kernel_block_size=kernel, one_tensor=one_tensor
    )
    with use_provider(provider):
        check(step, *step.run())


def test_control_a_wrong_expansion_of_the_block_table_differs() -> None:
    step = SparseStep([3, 1], [140, 61], block_size=64, kernel_block_size=16)
    chosen, output = step.run()
    metadata = step.build()
    table = step.block_table.repeat_interleave(4, 1) * 4
    wrong = attrs.evolve(metadata, block_table=table[:2])
    again = step.impl().forward(
        *step.query, step.caches["latent"], step.caches["rope"], chosen, wrong, output.clone()
    )
    assert not torch.allclose(again, output, equal_nan=True, **TOLERANCE)


def test_blocks_that_are_no_views_are_refused() -> None:
    step = SparseStep([3], [40], block_size=64, kernel_block_size=16)
    apart = torch.zeros(8, 1, 96, 512)[:, :, :64]
    with pytest.raises(InvalidFieldError, match="latent_cache: found strides"):
        step.impl().forward(
            *step.query,
            apart,
            step.caches["rope"],
            torch.zeros(3, 1, 8, dtype=torch.int32),
            step.build(),
            torch.empty(3, 4, 512),
        )


@given(steps(max_reqs=3, max_computed=60), st.integers(1, 4), st.integers(0, 99))
def test_parts_of_the_choice_merge_to_the_whole(
    step: tuple[list[int], list[int]], ranks: int, seed: int
) -> None:
    """Each part takes the chosen positions p with p % ranks == rank, packed to the front."""
    scenario = SparseStep(*step, top_k=6, seed=seed)
    chosen, output = scenario.run()
    caches = scenario.caches["latent"], scenario.caches["rope"]
    parts = []
    for rank in range(ranks):
        mine = torch.where((chosen >= 0) & (chosen % ranks == rank), chosen, -1)
        mine = mine.gather(-1, (mine < 0).int().argsort(dim=-1, stable=True))
        part = scenario.impl().forward_partial(*scenario.query, *caches, mine, scenario.build())
        empty = (mine < 0).all(-1)[:, 0]
        assert part.lse.isneginf().all(-1).tolist() == empty.tolist()
        assert not part.out[empty].any()
        parts.append(part)
    merged = merge(parts)
    torch.testing.assert_close(merged.out, output, **TOLERANCE)
    for token in range(len(output)):
        expected = scenario.attention(token, scenario.best(token))[1]
        torch.testing.assert_close(merged.lse[token].double(), expected, **TOLERANCE)


def test_control_merging_overlapping_parts_differs() -> None:
    scenario = SparseStep([4], [30], top_k=6)
    chosen, output = scenario.run()
    caches = scenario.caches["latent"], scenario.caches["rope"]
    first = chosen.clone()
    first[..., 3:] = -1
    whole, half = (
        scenario.impl().forward_partial(*scenario.query, *caches, rows, scenario.build())
        for rows in (chosen, first)
    )
    assert not torch.allclose(merge([whole, half]).out, output, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_vendor_tolerance(dtype: torch.dtype) -> None:
    """Vendor comparison: rtol 2**-7 and atol 1e-4 (bf16), 0.005 and 2.5e-5 (fp16), 0.5 % outside.

    Scores of near equals may change places in half precision, so that the choice is judged by its
    scores: no key left out may be better than a chosen one by more than rounding.
    """
    rtol, atol = {torch.bfloat16: (2**-7, 1e-4), torch.float16: (0.005, 2.5e-5)}[dtype]
    step = SparseStep([7, 1, 4], [90, 33, 4], dtype=dtype, top_k=16)
    chosen, output = step.run()
    outside = total = 0
    for token in range(len(output)):
        row = [entry for entry in chosen[token, 0].tolist() if entry >= 0]
        scores = step.scores(token)
        left = scores.index_fill(0, torch.tensor(row), -math.inf)
        assert float(left.max()) <= float(scores[row].min()) + 1e-2
        expected, _ = step.attention(token, row)
        error = (output[token].double() - expected).abs()
        outside += int((error > atol + rtol * expected.abs()).sum())
        total += error.numel()
    assert outside <= 0.005 * total


def test_output_is_the_callers_storage() -> None:
    step = SparseStep([2], [9])
    chosen, _ = step.run()
    output = torch.zeros(5, 4, 512)
    caches = step.caches["latent"], step.caches["rope"]
    result = step.impl().forward(*step.query, *caches, chosen, step.build(), output)
    assert result is output
    assert output[:2].all(-1).all()
    assert not output[2:].any()


@pytest.mark.parametrize("entries", [[-1] * 4, [40, -1, -1, -1], [-1, 3, 2, 1]])
def test_rows_that_choose_nothing_are_neutral(entries: list[int]) -> None:
    step = SparseStep([1, 1], [9, 9])
    step.write(step.batch())
    chosen = torch.tensor([[entries], [[0, 5, -1, -1]]], dtype=torch.int32)
    caches = step.caches["latent"], step.caches["rope"]
    part = step.impl().forward_partial(*step.query, *caches, chosen, step.build())
    assert not part.out[0].any()
    assert part.lse[0].isneginf().all()
    expected, lse = step.attention(1, [0, 5])
    torch.testing.assert_close(part.out[1].double(), expected, **TOLERANCE)
    torch.testing.assert_close(part.lse[1].double(), lse, **TOLERANCE)


@pytest.mark.parametrize("query_lens", [[], [0, 0]])
def test_a_step_without_tokens(query_lens: list[int]) -> None:
    step = SparseStep(query_lens, [5] * len(query_lens))
    chosen, output = step.run(step.batch().padded(4, 3))
    assert chosen.shape == (0, 1, 8)
    assert output.shape == (3, 4, 512)
    assert not output.any()
    part = step.impl().forward_partial(
        *step.query, step.caches["latent"], step.caches["rope"], chosen, step.build()
    )
    assert isinstance(part, PartialAttention)
    assert part.lse.shape == (0, 4)


def on_meta(batch: AttentionBatch) -> AttentionBatch:
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    moved = {name: getattr(batch, name).to("meta") for name in names}
    return attrs.evolve(batch, **moved, query_start_loc_cpu=None, seq_lens_cpu=None)


@pytest.mark.parametrize(
    "builder", [AscendSFAMetadataBuilder(16), AscendSFAIndexerMetadataBuilder(16)]
)
def test_builders_never_read_the_device(builder: AscendSFAMetadataBuilder) -> None:
    """A meta tensor has no values: reading one raises."""
    metadata = builder.build(on_meta(SparseStep([3, 1], [20, 40]).batch()))
    assert metadata.seq_lens.device.type == "meta"
    assert metadata.num_tokens == 4


def test_control_a_builder_with_host_lengths_reads_the_device() -> None:
    batch = on_meta(SparseStep([3, 1], [20, 40]).batch())
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        AscendAttentionMetadataBuilder(16).build(batch)


@given(st.lists(steps(max_reqs=3), min_size=2, max_size=4))
def test_building_later_steps_changes_no_earlier_one(
    several: list[tuple[list[int], list[int]]],
) -> None:
    """One set of buffers is refilled for every step, as a runner does."""
    batches = [SparseStep(*step).batch() for step in several]
    buffers = {
        "query_start_loc": torch.zeros(8, dtype=torch.int32),
        "seq_lens": torch.zeros(8, dtype=torch.int32),
        "slot_mapping": torch.zeros(64, dtype=torch.int64),
    }
    builder = AscendSFAMetadataBuilder(16)
    built = []
    for batch in batches:
        views = {name: buffer[: len(getattr(batch, name))] for name, buffer in buffers.items()}
        for name, view in views.items():
            view.copy_(getattr(batch, name))
        built.append(builder.build(attrs.evolve(batch, **views)))
    for metadata, batch in zip(built, batches, strict=True):
        alone = builder.build(batch)
        for name in ("query_ends", "seq_lens", "slot_mapping", "block_table"):
            assert torch.equal(getattr(metadata, name), getattr(alone, name))
        ends = metadata.query_ends
        assert (ends.diff() >= 0).all()
        assert int(ends[-1]) == metadata.num_tokens
        assert (metadata.seq_lens >= 0).all()


@given(steps(max_reqs=3, max_query=6), st.booleans(), st.data())
def test_narrowed_steps_see_the_same_keys(
    step: tuple[list[int], list[int]], causal: bool, data: st.DataObject
) -> None:
    scenario = SparseStep(*step, causal=causal)
    chosen, output = scenario.run()
    total = len(output)
    first = data.draw(st.integers(0, total - 1))
    last = data.draw(st.integers(first + 1, total))
    part = scenario.build().narrowed(first, last)
    query = [rows[first:last] for rows in scenario.query]
    caches = scenario.caches["latent"], scenario.caches["rope"]
    found = scenario.impl().forward(
        *query, *caches, chosen[first:last], part, torch.empty(last - first, 4, 512)
    )
    torch.testing.assert_close(found, output[first:last], rtol=1e-6, atol=1e-6)


BAD_SHAPES = {
    "query_latent": (0, torch.zeros(4, 4, 511)),
    "query_rope": (1, torch.zeros(2, 4, 64)),
    "latent_cache": (2, torch.zeros(4, 1, 32, 512)),
    "rope_cache": (3, torch.zeros(4, 1, 16, 63)),
    "topk_indices": (4, torch.zeros(3, 1, 8, dtype=torch.int32)),
    "output": (6, torch.zeros(4, 3, 512)),
}


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_shapes_that_do_not_fit_are_named(name: str) -> None:
    step = SparseStep([4], [9])
    arguments = [
        *step.query,
        step.caches["latent"],
        step.caches["rope"],
        torch.zeros(4, 1, 8, dtype=torch.int32),
        step.build(),
        torch.zeros(4, 4, 512),
    ]
    place, arguments[place] = BAD_SHAPES[name][0], BAD_SHAPES[name][1]
    with pytest.raises(InvalidFieldError, match=f"{name}: found"):
        step.impl().forward(*arguments)


def test_causality_per_request_is_refused() -> None:
    batch = attrs.evolve(SparseStep([1, 2], [3, 4]).batch(), causal=torch.tensor([True, False]))
    with pytest.raises(AttentionBatchError, match="causal: found one value per request"):
        AscendSFAMetadataBuilder(16).build(batch)


@pytest.mark.parametrize(
    ("sizes", "field"), [((24, None), "block_size"), ((128, 48), "kernel_block_size")]
)
def test_blocks_that_the_operators_do_not_take(sizes: tuple[int, int | None], field: str) -> None:
    builder = AscendSFAMetadataBuilder(sizes[0], kernel_block_size=sizes[1])
    with pytest.raises(InvalidFieldError, match=f"^{field}: found"):
        builder.build(AttentionBatch.from_lengths([1], [5], sizes[0]))


def test_layers_never_read_the_device() -> None:
    """Everything on the meta device, where reading a value raises: indexer, attention, writes."""
    step = SparseStep([3, 1], [20, 40])
    batch = on_meta(step.batch())
    metadata = step.build(batch)
    caches = {name: cache.to("meta") for name, cache in step.caches.items()}
    query = [part.to("meta") for part in step.query]
    rows = {name: step.new_rows(name).to("meta") for name in caches}
    impl, indexer = step.impl(), step.indexer()
    pair = caches["latent"], caches["rope"]
    impl.write_kv(rows["latent"], rows["rope"], *pair, metadata.slot_mapping)
    indexer.write_kv(rows["index"], caches["index"], metadata.slot_mapping)
    index_query, weights = step.index_query.to("meta"), step.weights.to("meta")
    chosen = indexer.forward(index_query, weights, caches["index"], metadata)
    assert chosen.shape == (4, 1, 8)
    output = torch.empty_like(query[0])
    assert impl.forward(*query, *pair, chosen, metadata, output) is output
    assert impl.forward_partial(*query, *pair, chosen, metadata).lse.shape == (4, 4)


def test_a_compiled_layer_gives_the_same() -> None:
    """One graph for writing, choosing and attending; the caches are changed in place."""
    step, twin = SparseStep([3, 1], [20, 40]), SparseStep([3, 1], [20, 40])
    metadata = step.build()
    impl, indexer = step.impl(), step.indexer()

    def layer(
        rows: list[torch.Tensor],
        query: list[torch.Tensor],
        index: list[torch.Tensor],
        caches: list[torch.Tensor],
        output: torch.Tensor,
    ) -> torch.Tensor:
        impl.write_kv(rows[0], rows[1], caches[0], caches[1], metadata.slot_mapping)
        indexer.write_kv(rows[2], caches[2], metadata.slot_mapping)
        chosen = indexer.forward(index[0], index[1], caches[2], metadata)
        return impl.forward(query[0], query[1], caches[0], caches[1], chosen, metadata, output)

    output = torch.empty(4, 4, 512)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(
        [step.new_rows(name) for name in step.caches],
        list(step.query),
        [step.index_query, step.weights],
        list(step.caches.values()),
        output,
    )
    _, expected = twin.run()
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    for name, cache in step.caches.items():
        assert torch.equal(cache.nan_to_num(7.0), twin.caches[name].nan_to_num(7.0))
