"""The standard backend equals a dense float64 formula, and torch's own attention."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from attn_backends_support import Scenario, padded, steps, visible
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import AscendAttentionBackendImpl, MaskMode

BATCHES = {
    "prefill": ([17, 5, 40], [17, 5, 40]),
    "chunked prefill": ([16, 7], [48, 23]),
    "decode": ([1, 1, 1, 1], [1, 16, 17, 33]),
    "verification": ([4, 4, 2], [20, 4, 35]),
    "mixed": ([1, 4, 12, 9, 1], [31, 12, 12, 25, 2]),
    "rows without tokens": ([0, 3, 0, 2], [0, 3, 7, 20]),
}


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_dense_formula(name: str, window: int | None, block_size: int) -> None:
    query_lens, seq_lens = BATCHES[name]
    scenario = Scenario(query_lens, seq_lens, block_size=block_size, window=window)
    scenario.compare(scenario.run())


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (14, 2), (9, 3)])
def test_head_groups(heads: int, kv_heads: int) -> None:
    scenario = Scenario(*BATCHES["mixed"], heads=heads, kv_heads=kv_heads, head_size=64)
    scenario.compare(scenario.run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    scenario = Scenario(*BATCHES["mixed"], dtype=dtype, head_size=64)
    output = scenario.run()
    assert output.dtype == dtype
    scenario.compare(output)


def test_head_major_cache_memory() -> None:
    scenario = Scenario(*BATCHES["mixed"], token_major=False)
    scenario.compare(scenario.run())


def test_key_and_value_in_one_buffer() -> None:
    """vLLM keeps K and V of a head side by side: both caches are strided views of one buffer."""
    scenario = Scenario(*BATCHES["mixed"])
    both = torch.cat([scenario.key_cache, scenario.value_cache], dim=-1)
    scenario.key_cache, scenario.value_cache = both.chunk(2, dim=-1)
    assert not scenario.key_cache.is_contiguous()
    scenario.compare(scenario.run())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [False, [True, False, True, False, False]])
def test_non_causal_requests(causal: bool | list[bool], window: int | None) -> None:
    scenario = Scenario(*BATCHES["mixed"], causal=causal, window=window)
    scenario.compare(scenario.run())


def test_mixed_causality_uses_one_call_per_kind() -> None:
    scenario = Scenario(*BATCHES["mixed"], causal=[True, False, True, False, False])
    launches = scenario.build().launches
    assert [(call.causal, call.num_tokens) for call in launches] == [(True, 13), (False, 14)]
    assert [call.query_lens_cumulative for call in launches] == [(1, 13), (4, 13, 14)]


@given(
    steps(),
    st.sampled_from([16, 128]),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.none() | st.integers(1, 50),
    st.integers(0, 2**16),
)
def test_any_step_equals_dense_formula(
    step: tuple[list[int], list[int]],
    block_size: int,
    heads: tuple[int, int],
    window: int | None,
    seed: int,
) -> None:
    scenario = Scenario(
        *step, block_size=block_size, heads=heads[0], kv_heads=heads[1], window=window, seed=seed
    )
    scenario.compare(scenario.run())


@given(st.data())
def test_any_schedule_in_chunks_equals_the_whole(data: st.DataObject) -> None:
    """A request computed in chunks of any size, beside others, gives the rows of one prefill."""
    totals = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3), label="totals")
    window = data.draw(st.none() | st.integers(1, 20), label="window")
    whole = Scenario(totals, totals, window=window)
    expected = whole.expected().split(totals)
    queries = whole.query.split(totals)
    done = [0] * len(totals)
    while any(d < t for d, t in zip(done, totals, strict=True)):
        chunk = [
            data.draw(st.integers(0, min(9, t - d)), label="chunk")
            for d, t in zip(done, totals, strict=True)
        ]
        if not any(chunk):
            chunk = [min(1, t - d) for d, t in zip(done, totals, strict=True)]
        ends = [d + c for d, c in zip(done, chunk, strict=True)]
        step = attrs.evolve(whole, query_lens=chunk, seq_lens=ends)
        step.block_table, step.key_cache, step.value_cache = (
            whole.block_table, whole.key_cache, whole.value_cache,
        )  # fmt: skip
        step.keys = [k[:n] for k, n in zip(whole.keys, step.seq_lens, strict=True)]
        step.values = [v[:n] for v, n in zip(whole.values, step.seq_lens, strict=True)]
        step.query = torch.cat([q[d : d + c] for q, d, c in zip(queries, done, chunk, strict=True)])
        rows = step.run().split(chunk)
        for request, row in enumerate(rows):
            wanted = expected[request][done[request] : done[request] + chunk[request]]
            torch.testing.assert_close(row.double(), wanted, rtol=1e-5, atol=1e-5)
        done = step.seq_lens


@given(steps(max_reqs=3), st.none() | st.integers(1, 50), st.booleans())
def test_mask_is_the_dense_definition(
    step: tuple[list[int], list[int]], window: int | None, causal: bool
) -> None:
    """Equal scores and one-hot values make each output row the mask row itself."""
    scenario = Scenario(*step, head_size=64, heads=1, kv_heads=1, window=window, causal=causal)
    scenario.query.zero_()
    for row, length in enumerate(scenario.seq_lens):
        scenario.values[row] = torch.eye(64)[:length, None]
        for position in range(length - scenario.query_lens[row]):
            scenario.place(row, position)
    for row, out in enumerate(scenario.run().split(scenario.query_lens)):
        mask = visible(len(out), scenario.seq_lens[row], causal=causal, window=window)
        assert torch.equal(out[:, 0, : mask.shape[1]] > 0, mask)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", ["prefill", "chunked prefill", "decode", "verification", "mixed"])
def test_equals_torch_sdpa(name: str, window: int | None) -> None:
    scenario = Scenario(*BATCHES[name], heads=8, kv_heads=2, head_size=64, window=window)
    output = scenario.run().split(scenario.query_lens)
    for row, query in enumerate(scenario.query.split(scenario.query_lens)):
        mask = visible(len(query), scenario.seq_lens[row], causal=True, window=window)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            scenario.keys[row].transpose(0, 1)[None],
            scenario.values[row].transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )
        torch.testing.assert_close(output[row], expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


class TestNegativeControls:
    """Each deliberate fault must make the comparison fail."""

    def fails(self, scenario: Scenario, **run: object) -> None:
        output = scenario.run(**run)
        with pytest.raises(AssertionError):
            scenario.compare(output)

    def test_window_one_key_wider(self) -> None:
        scenario = Scenario(*BATCHES["mixed"], window=6)
        wider = AscendAttentionBackendImpl(4, 16, scenario.scale, 2, 7)
        self.fails(scenario, impl=wider)

    def test_causal_mask_one_key_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scenario = Scenario(*BATCHES["verification"])
        impl = scenario.impl()
        monkeypatch.setitem(impl._modes, True, MaskMode(4, next_tokens=1))
        self.fails(scenario, impl=impl)

    def test_mask_dropped(self) -> None:
        scenario = Scenario(*BATCHES["verification"])
        self.fails(scenario, batch=scenario.batch(causal=False))

    def test_block_table_rows_swapped(self) -> None:
        scenario = Scenario([1, 1], [20, 20])
        batch = scenario.batch()
        swapped = attrs.evolve(batch, block_table=batch.block_table.flip(0))
        self.fails(scenario, batch=swapped)

    def test_block_order_inside_a_row(self) -> None:
        scenario = Scenario([1], [32], window=8)
        batch = scenario.batch()
        self.fails(scenario, batch=attrs.evolve(batch, block_table=batch.block_table.flip(1)))

    def test_one_key_short(self) -> None:
        scenario = Scenario(*BATCHES["decode"])
        batch = scenario.batch()
        short = batch.seq_lens_cpu.clone()
        short[1] -= 1
        self.fails(scenario, batch=attrs.evolve(batch, seq_lens_cpu=short))

    def test_scale(self) -> None:
        scenario = Scenario(*BATCHES["mixed"])
        self.fails(scenario, impl=AscendAttentionBackendImpl(4, 16, scenario.scale * 1.01, 2))

    def test_missing_write(self) -> None:
        scenario = Scenario(*BATCHES["decode"])
        batch = scenario.batch()
        slots = batch.slot_mapping.clone()
        slots[2] = -1
        self.fails(scenario, batch=attrs.evolve(batch, slot_mapping=slots))


class TestForwardContract:
    def test_padding_rows_become_zero(self) -> None:
        scenario = Scenario(*BATCHES["mixed"])
        batch = scenario.batch().padded(num_rows=8, num_token_rows=32)
        output = scenario.run(batch)
        scenario.compare(output)
        assert output.shape[0] == 32
        assert torch.count_nonzero(output[batch.num_tokens :]) == 0

    def test_strided_query(self) -> None:
        scenario = Scenario(*BATCHES["mixed"])
        expected = scenario.run()
        wide = torch.randn(len(scenario.query), 3 * 4 * 16)
        wide[:, :64] = scenario.query.flatten(1)
        strided = wide[:, :64].unflatten(1, (4, 16))
        assert not strided.is_contiguous()
        caches = (scenario.key_cache, scenario.value_cache)
        output = scenario.impl().forward(
            strided, *caches, scenario.build(), torch.empty_like(expected)
        )
        assert torch.equal(output, expected)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"query": (27, 5, 16)}, "query"),
            ({"query": (26, 4, 16)}, "query"),
            ({"output": (27, 4, 8)}, "output"),
            ({"key_cache": (3, 2, 32, 16)}, "key_cache"),
        ],
    )
    def test_wrong_shapes_are_named(self, change: dict[str, tuple[int, ...]], field: str) -> None:
        scenario = Scenario(*BATCHES["mixed"])
        shapes = {"query": (27, 4, 16), "output": (27, 4, 16), "key_cache": (3, 2, 16, 16)}
        shapes |= change
        tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        with pytest.raises(ValueError, match=f"^{field}: found .*; allowed: "):
            scenario.impl().forward(
                tensors["query"],
                tensors["key_cache"],
                torch.zeros(3, 2, 16, 16),
                scenario.build(),
                tensors["output"],
            )

    def test_write_needs_a_row_per_slot(self) -> None:
        scenario = Scenario([2], [2])
        short = torch.zeros(1, 2, 16)
        caches = (scenario.key_cache, scenario.value_cache)
        with pytest.raises(ValueError, match=r"key: found 1 rows; allowed: at least 2"):
            scenario.impl().write_kv(short, short, *caches, torch.tensor([0, 1]))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((0, 16, 1.0), "num_heads: found 0"),
            ((4, 0, 1.0), "head_size: found 0"),
            ((4, 16, 1.0, 3), "num_heads: found 4; allowed: a multiple of 3"),
            ((4, 16, 1.0, 0), "num_kv_heads: found 0"),
            ((4, 16, 1.0, 4, 0), "sliding_window: found 0"),
        ],
    )
    def test_wrong_layers_are_named(self, arguments: tuple[int, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            AscendAttentionBackendImpl(*arguments)

    def test_empty_batch(self) -> None:
        scenario = Scenario([], [])
        assert scenario.build().launches == ()
        output = torch.full((3, 4, 16), math.nan)
        caches = (scenario.key_cache, scenario.value_cache)
        result = scenario.impl().forward(
            padded(scenario.query, 3), *caches, scenario.build(), output
        )
        assert torch.count_nonzero(result) == 0
