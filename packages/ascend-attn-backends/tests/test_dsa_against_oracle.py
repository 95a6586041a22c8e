"""Compressed attention against float64 formulas, on any step; its builder and its refusals."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from attn_backends_support import steps
from dsa_oracle import HEAVY, KINDS, SPARSE, DsaStep
from half_precision import assert_vendor_close
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    AscendDSACompressor,
    AscendDSAImpl,
    AscendDSAIndexerImpl,
    AscendDSAMetadata,
    AscendDSAMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    CompressorWeights,
    DsaCompression,
    DsaTables,
    InvalidFieldError,
)
from ascend_attn_backends.dsa.steps import repeated_tokens
from ascend_attn_ops import PartialAttention, merge_partials

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
STEPS = steps(max_reqs=4, max_computed=50)


def check(step: DsaStep, chosen: torch.Tensor | None, output: torch.Tensor) -> None:
    """Near equals may change places in float32, so that a choice is judged by its scores."""
    for token in range(len(step.tokens())):
        numbers = best = step.best(token)
        if chosen is not None:
            numbers = chosen[token, 0, : len(best)].tolist()
            assert (chosen[token, 0, len(best) :] == -1).all()
            assert len(set(numbers)) == len(numbers)
            scores = step.scores(token)
            torch.testing.assert_close(scores[numbers], scores[best], **TOLERANCE)
        expected, _ = step.attention(token, numbers)
        torch.testing.assert_close(output[token].double(), expected, **TOLERANCE)


@given(STEPS, st.sampled_from([*KINDS]), st.sampled_from([16, 128]), st.integers(0, 99))
def test_any_step(step: tuple[list[int], list[int]], kind: str, block: int, seed: int) -> None:
    scenario = DsaStep(*step, compression=KINDS[kind], block_size=block, seed=seed)
    check(scenario, *scenario.run())


@given(
    steps(max_reqs=3),
    st.sampled_from([*KINDS]),
    st.integers(0, 3),
    st.integers(0, 5),
    st.booleans(),
)
def test_padding_changes_nothing_and_writes_nothing(
    step: tuple[list[int], list[int]], kind: str, rows: int, tokens: int, drafts: bool
) -> None:
    options = {"compression": KINDS[kind], "num_spec_tokens": 8 * drafts}
    scenario, twin = DsaStep(*step, **options), DsaStep(*step, **options)
    batch = scenario.batch()
    chosen, output = scenario.run(
        batch.padded(batch.num_rows + rows, batch.num_token_rows + tokens)
    )
    alone = twin.run()
    assert chosen is None if alone[0] is None else torch.equal(chosen, alone[0])
    assert torch.equal(output[: batch.num_tokens], alone[1])
    assert not output[batch.num_tokens :].any()
    pairs = [(scenario.caches[name], twin.caches[name]) for name in scenario.caches]
    for name in scenario.states:
        pairs += zip(scenario.states[name], twin.states[name], strict=True)
    for found, expected in pairs:
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*KINDS])
def test_half_precision_keeps_the_vendor_tolerance(kind: str, dtype: torch.dtype) -> None:
    """Each operator on what it reads: keys from the hidden states, attention over the keys as the
    cache has them."""
    step = DsaStep([7, 1, 4], [90, 33, 4], KINDS[kind], dtype=dtype, seed=3)
    chosen, output = step.run()
    pairs = []
    for token in range(len(output)):
        numbers = step.best(token) if chosen is None else chosen[token, 0].tolist()
        numbers = [number for number in numbers if number >= 0]
        pairs.append((output[token], step.attention(token, numbers, cached=True)[0]))
    for row, length in enumerate(step.seq_lens):
        if step.compression is not None and length >= step.compression.ratio:
            made = step.made("compressed", row)
            pairs.append((step.cached(row)[: len(made)], made))
    found, expected = (
        torch.cat([side.flatten().double() for side in sides]) for sides in zip(*pairs, strict=True)
    )
    assert_vendor_close(found, expected, dtype)


def partial(step: DsaStep, metadata: AscendDSAMetadata, **keys: Any) -> PartialAttention:
    return step.impl().forward_partial(step.query, step.caches["window"], metadata, **keys)


@given(STEPS, st.sampled_from([*KINDS]), st.booleans(), st.integers(0, 99))
def test_parts_of_the_keys_merge_to_the_whole(
    step: tuple[list[int], list[int]], kind: str, with_sinks: bool, seed: int
) -> None:
    """Window and compressed keys apart, then merged; the sinks count once."""
    scenario = DsaStep(*step, compression=KINDS[kind], with_sinks=with_sinks, seed=seed)
    chosen, output = scenario.run()
    keys, metadata = scenario.keys(chosen), scenario.build()
    whole = partial(scenario, metadata, **keys)
    for token in range(len(output)):
        row = scenario.best(token) if chosen is None else chosen[token, 0].tolist()
        expected = scenario.attention(token, [n for n in row if n >= 0], sinks=False)
        torch.testing.assert_close(whole.out[token].double(), expected[0], **TOLERANCE)
        torch.testing.assert_close(whole.lse[token].double(), expected[1], **TOLERANCE)
    torch.testing.assert_close(scenario.impl().with_sinks(whole), output, **TOLERANCE)
    if scenario.compression is None:
        return
    window = attrs.evolve(metadata, compressed=None)
    alone = AscendDSAImpl(scenario.heads, scenario.scale, None, None, scenario.size)
    nothing = attrs.evolve(metadata, seq_lens=torch.zeros_like(metadata.seq_lens))
    parts = [
        alone.forward_partial(scenario.query, scenario.caches["window"], window),
        partial(scenario, nothing, **keys),
    ]
    seen = torch.tensor([bool(scenario.best(token)) for token in range(len(output))])
    assert torch.equal(parts[1].lse.isneginf().all(-1), ~seen)
    assert not parts[1].out[~seen].any()
    torch.testing.assert_close(
        scenario.impl().with_sinks(merge_partials(parts)), output, **TOLERANCE
    )


def test_control_sinks_in_every_part_differ() -> None:
    step = DsaStep([4], [30])
    chosen, output = step.run()
    whole = partial(step, step.build(), **step.keys(chosen))
    twice = PartialAttention(step.impl().with_sinks(whole), whole.lse)
    assert not torch.allclose(step.impl().with_sinks(twice), output, **TOLERANCE)


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("query_lens", [[], [0, 0]])
def test_a_step_without_tokens(kind: str, query_lens: list[int]) -> None:
    step = DsaStep(query_lens, [21] * len(query_lens), KINDS[kind])
    chosen, output = step.run(step.batch().padded(4, 3))
    assert chosen is None or chosen.shape == (0, 1, 3)
    assert output.shape == (3, 4, 32)
    assert not output.any()
    part = partial(step, step.build(), **step.keys(chosen))
    assert part.lse.shape == (0, 4)


def on_meta(tensor: Any) -> Any:
    """A copy on the meta device, of records too: it has no values, so that reading one raises."""
    if isinstance(tensor, torch.Tensor):
        return tensor.to("meta")
    return attrs.evolve(
        tensor,
        **{
            field.name: on_meta(value)
            for field in attrs.fields(type(tensor))
            if isinstance(value := getattr(tensor, field.name), torch.Tensor)
            and not field.name.endswith("_cpu")
        },
    )


@pytest.mark.parametrize("lengths_on_host", [True, False])
@pytest.mark.parametrize("kind", [*KINDS])
def test_nothing_reads_the_device(kind: str, lengths_on_host: bool) -> None:
    """Builder, compressor, indexer and attention on a device without values."""
    step = DsaStep([3, 1, 9], [20, 40, 9], KINDS[kind], num_spec_tokens=3)
    batch = on_meta(step.batch())
    if not lengths_on_host:
        batch = attrs.evolve(batch, seq_lens_cpu=None)
    for name in ("hidden", "kv"):
        setattr(step, name, [on_meta(rows) for rows in getattr(step, name)])
    for name in ("query", "index_query", "index_weights", "sinks", "tables"):
        value = getattr(step, name)
        setattr(step, name, None if value is None else on_meta(value))
    step.caches = {name: on_meta(cache) for name, cache in step.caches.items()}
    step.states = {name: (on_meta(a), on_meta(b)) for name, (a, b) in step.states.items()}
    step.weights = {name: on_meta(w) if w else None for name, w in step.weights.items()}
    step.before = lambda: None  # type: ignore[method-assign]
    chosen, output = step.run(batch)
    assert output.device.type == "meta"
    assert chosen is None or chosen.shape == (13, 1, 3)
    assert step.build(batch).plan.device.type == "meta"


def test_control_reading_a_meta_tensor_raises() -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        on_meta(DsaStep([3], [20]).batch()).validate()


def tensors(record: Any) -> list[torch.Tensor]:
    """Every tensor of a record and of the records in it."""
    found = []
    for field in attrs.fields(type(record)):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif attrs.has(type(value)):
            found += tensors(value)
    return found


@given(st.lists(steps(max_reqs=3), min_size=2, max_size=4), st.sampled_from([*KINDS]))
def test_building_later_steps_changes_no_earlier_one(
    several: list[tuple[list[int], list[int]]], kind: str
) -> None:
    """One set of buffers is refilled for every step, tables included, as a runner does."""
    scenarios = [DsaStep(*step, compression=KINDS[kind], num_spec_tokens=8) for step in several]
    buffers = {name: torch.zeros(64, 8, dtype=torch.int32) for name in ("compressed", "state")}
    lengths = {
        "query_start_loc": torch.zeros(8, dtype=torch.int32),
        "seq_lens": torch.zeros(8, dtype=torch.int32),
        "slot_mapping": torch.zeros(64, dtype=torch.int64),
    }
    built, alone = [], []
    for scenario in scenarios:
        batch = scenario.batch()
        views = {name: buffer[: len(getattr(batch, name))] for name, buffer in lengths.items()}
        for name, view in views.items():
            view.copy_(getattr(batch, name))
        tables = None
        if scenario.tables is not None:
            given = {name: getattr(scenario.tables, name) for name in buffers}
            rows = {name: buffers[name][: len(t), : t.shape[1]] for name, t in given.items()}
            for name, view in rows.items():
                view.copy_(given[name])
            tables = DsaTables(**rows)
        built.append(scenario.builder().build(attrs.evolve(batch, **views), tables))
        alone.append(scenario.build())
    for found, expected in zip(built, alone, strict=True):
        pairs = list(zip(tensors(found), tensors(expected), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs)
        assert (found.query_starts.diff() >= 0).all()
        assert int(found.query_starts[-1]) == found.num_tokens


@given(
    st.integers(1, 9),
    st.integers(0, 70),
    st.integers(0, 9),
    st.sampled_from([SPARSE, HEAVY, DsaCompression(128), DsaCompression(5, 2)]),
    st.booleans(),
)
def test_states_that_a_rejection_needs_are_kept(
    count: int, start: int, k: int, compression: DsaCompression, on_host: bool
) -> None:
    """Kept and repeated tokens are all that any shorter length still reads, and host lengths make
    them no more than that."""
    batch = AttentionBatch.from_lengths([2, count], [2, start + count], 16)
    if not on_host:
        batch = attrs.evolve(batch, seq_lens_cpu=None)
    repeated = repeated_tokens(batch, compression, k)
    rows = [] if repeated is None else repeated.tokens[repeated.requests == 1].tolist()
    again = {start + token - 2 for token in rows}
    end = start + count
    kept = set(range(compression.first_kept(start, end), end))
    if count > k + 1 or k == 0:
        assert not again
        return
    needed: set[int] = set()
    for length in range(start + 1, end + 1):
        needed |= set(range(max(compression.first_needed(length), start), length))
    assert needed <= kept | again
    if count > 1:
        assert again == (set(range(start, end)) - kept if on_host else set(range(start, end)))


def test_few_drafts_repeat_nothing() -> None:
    """The usual case: up to 3 drafts over groups of 4 tokens that overlap."""
    for start in range(64):
        batch = AttentionBatch.from_lengths([4], [start + 4], 16)
        assert repeated_tokens(batch, DsaCompression(4, 512), 3) is None


def refused(name: str, call: Any, *words: str) -> None:
    with pytest.raises(InvalidFieldError) as raised:
        call()
    assert raised.value.field == name
    for word in words:
        assert word in str(raised.value)


def test_what_the_builder_refuses() -> None:
    step, heavy, plain = DsaStep([3], [200]), DsaStep([3], [20], HEAVY), DsaStep([3], [20], None)
    build, batch, tables = step.builder().build, step.batch(), step.tables
    refused("tables", lambda: build(batch), "NoneType", "DsaTables")
    refused("tables", lambda: plain.builder().build(plain.batch(), heavy.tables), "None")
    refused("causal", lambda: build(attrs.evolve(batch, causal=False), tables), "False")
    long = attrs.evolve(tables, state=tables.state.long())
    refused("tables.state", lambda: build(batch, long), "int64", "int32")
    few = attrs.evolve(tables, compressed=tables.compressed[:0])
    refused("tables.compressed", lambda: build(batch, few), "[0, 4]", "at least 1")
    narrow = attrs.evolve(tables, compressed=tables.compressed[:, :3])
    refused("tables.compressed", lambda: build(batch, narrow), "3 columns", "at least 4")
    narrow = attrs.evolve(tables, state=tables.state[:, :3])
    refused("tables.state", lambda: build(batch, narrow), "3 columns", "at least 13")
    drafts = attrs.evolve(step.builder(), num_spec_tokens=2)
    blind = attrs.evolve(batch, query_start_loc_cpu=None)
    with pytest.raises(AttentionBatchError, match="query_start_loc_cpu: found None"):
        drafts.build(blind, tables)
    with pytest.raises(ValueError, match="num_heads"):
        AscendDSAMetadataBuilder(16, num_heads=0)
    with pytest.raises(ValueError, match="ratio"):
        DsaCompression(1)


def test_what_a_layer_refuses() -> None:
    step, heavy, plain = DsaStep([3], [20]), DsaStep([3], [20], HEAVY), DsaStep([3], [20], None)
    chosen, output = step.run()
    heavy.run()
    plain.run()
    impl, window, metadata = step.impl(), step.caches["window"], step.build()
    compressed, query = step.caches["compressed"], step.query

    def forward(layer: AscendDSAImpl, *arguments: Any, **keys: Any) -> Any:
        return lambda: layer.forward(query, window, *arguments, **keys)

    both = {"compressed_cache": compressed, "topk_indices": chosen}
    refused("compressed_cache", forward(impl, metadata, output), "found None")
    only = {"compressed_cache": compressed}
    refused("topk_indices", forward(impl, metadata, output, **only), "a tensor")
    refused("topk_indices", forward(heavy.impl(), heavy.build(), output, **both), "None")
    refused("compressed_cache", forward(plain.impl(), plain.build(), output, **only), "None")
    refused("metadata", forward(impl, heavy.build(), output, **both), "ratio=8", "ratio=4")
    refused("metadata", forward(impl, plain.build(), output, **both), "the window alone")
    refused("metadata", forward(plain.impl(), metadata, output), "compressing layers")
    few = {"compressed_cache": compressed, "topk_indices": chosen[..., :2]}
    refused("topk_indices", forward(impl, metadata, output, **few), "3]")
    refused("output", forward(impl, metadata, output[:2], **both), "at least 3")
    refused("query", lambda: impl.forward(query[:, :2], window, metadata, output, **both))
    refused("window_cache", lambda: impl.forward(query, window[:, :, :8], metadata, output, **both))
    refused("sinks", lambda: AscendDSAImpl(4, 1.0, None, torch.zeros(3)), "[3]", "float32 [4]")
    refused("num_heads", lambda: AscendDSAImpl(0, 1.0))


def test_what_compressor_and_indexer_refuse() -> None:
    step, heavy = DsaStep([3], [20]), DsaStep([3], [20], HEAVY)
    weights = step.weights["compressed"]
    for name in ("kv", "gate", "position_bias", "norm"):
        wrong = attrs.evolve(weights, **{name: getattr(weights, name)[:-1]})
        refused(name, lambda wrong=wrong: AscendDSACompressor(SPARSE, wrong, 32, 8))
    assert isinstance(weights, CompressorWeights)
    compressor, metadata = step.compressor("compressed"), step.build()
    rows, states = metadata.compressed.compressor, step.states["compressed"]
    rotary = step.rotary(rows.key_positions)
    hidden = step.new_rows(step.hidden, 3)
    refused("hidden", lambda: compressor.forward(hidden[:2], states, rotary, metadata))
    refused("cos", lambda: compressor.forward(hidden, states, (rotary[0][:0], rotary[1]), metadata))
    refused("metadata", lambda: compressor.forward(hidden, states, rotary, heavy.build()))
    refused("compression.top_k", lambda: AscendDSAIndexerImpl(16, HEAVY), "None")
    indexer, cache = AscendDSAIndexerImpl(16, SPARSE, 32), step.caches["index"]
    query, heads = step.index_query, step.index_weights
    refused("query", lambda: indexer.forward(query[:, :3], heads, cache, metadata))
    refused("metadata", lambda: indexer.forward(query, heads, cache, heavy.build()))


@pytest.mark.parametrize("kind", [*KINDS])
def test_a_compiled_layer_gives_the_same(kind: str) -> None:
    """One graph for compressing, choosing and attending; caches and states change in place."""
    step, twin = (DsaStep([3, 1], [20, 40], KINDS[kind]) for _ in range(2))
    step.before()
    metadata, output = step.build(), torch.full((4, 4, 32), math.nan)

    def layer(query: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        step.write(metadata, 4)
        keys = step.keys(step.choose(metadata, 4))
        return step.impl().forward(query, step.caches["window"], metadata, output, **keys)

    torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)(step.query, output)
    _, expected = twin.run()
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
