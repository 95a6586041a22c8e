"""The FA3 backend: a dense formula, bitwise batch invariance, and the call of flash-attn-npu."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from types import ModuleType

import attrs
import pytest
import torch
from attn_backends_support import TOLERANCES, Scenario, padded, steps
from fa3_support import layer_of, run_fa3, stand_in
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    AscendFABackend,
    AscendFAImpl,
    AscendFAMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    InvalidFieldError,
)
from ascend_attn_ops import ProviderUnavailableError, use_profile, use_provider

MIXED = ([1, 4, 12, 9, 1], [31, 12, 12, 25, 2])


@given(
    steps(),
    st.sampled_from([16, 128]),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 99),
)
def test_any_step_equals_the_dense_formula(
    step: tuple[list[int], list[int]],
    block_size: int,
    heads: tuple[int, int],
    causal: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    scenario = Scenario(
        *step, block_size, *heads, head_size=64, causal=causal, dtype=dtype, seed=seed
    )
    scenario.compare(run_fa3(scenario))


Run = Callable[[Scenario], torch.Tensor]


def part_of(whole: Scenario, row: int, first: int, last: int, **changes: object) -> Scenario:
    """One request of ``whole`` alone, with its tokens first up to last as the step."""
    part = attrs.evolve(whole, query_lens=[last - first], seq_lens=[last], **changes)
    start = sum(whole.query_lens[:row]) + first - (whole.seq_lens[row] - whole.query_lens[row])
    part.query = whole.query[start : start + last - first]
    part.keys, part.values = [whole.keys[row][:last]], [whole.values[row][:last]]
    for position in range(first):
        part.place(0, position)
    return part


def check_invariance(run: Run, scenario: Scenario, block_size: int) -> None:
    """Each token of a step gives the same bits alone, as a decode in other blocks."""
    together = run(scenario)
    token = 0
    for row, count in enumerate(scenario.query_lens):
        for place in range(scenario.seq_lens[row] - count, scenario.seq_lens[row]):
            alone = part_of(
                scenario, row, place, place + 1, block_size=block_size, seed=scenario.seed + 1
            )
            assert torch.equal(run(alone)[0], together[token]), f"row {row}, position {place}"
            token += 1


@given(
    steps(max_reqs=4),
    st.sampled_from([(16, 128), (128, 16), (16, 48)]),
    st.sampled_from([(4, 2, 16), (3, 3, 7), (8, 1, 64)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_row_has_the_same_bits_in_any_batch(
    step: tuple[list[int], list[int]],
    block_sizes: tuple[int, int],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    token_major: bool,
    seed: int,
) -> None:
    """Beside others or alone, in a prefill, a chunk, a verification or a decode."""
    heads, kv_heads, size = sizes
    scenario = Scenario(
        *step,
        block_sizes[0],
        heads,
        kv_heads,
        size,
        dtype=dtype,
        seed=seed,
        token_major=token_major,
    )
    check_invariance(run_fa3, scenario, block_sizes[1])


def test_control_the_standard_backend_has_other_bits_in_another_batch() -> None:
    """Its products span the rows of a request, so that the check must fail on it."""
    scenario = Scenario([33, 9, 5], [33, 40, 70], head_size=64)
    with pytest.raises(AssertionError, match="position"):
        check_invariance(lambda part: part.run(), scenario, 16)
    check_invariance(run_fa3, scenario, 16)
    scenario.compare(scenario.run())  # and yet its numbers are right


def test_padding_rows_become_zero_and_change_no_bit() -> None:
    scenario = Scenario(*MIXED)
    expected = run_fa3(scenario)
    output = run_fa3(scenario, scenario.batch().padded(num_rows=8, num_token_rows=32))
    assert torch.equal(output[:27], expected)
    assert torch.count_nonzero(output[27:]) == 0


def test_tokens_without_keys_give_zero() -> None:
    """A stale length shorter than the query: the first rows see nothing."""
    batch = AttentionBatch.from_lengths([3], [3], 16)
    batch.seq_lens[0] = 1
    metadata = AscendFAMetadataBuilder(16).build(attrs.evolve(batch, seq_lens_cpu=None))
    caches = torch.ones(2, 1, 1, 16, 8)
    output = AscendFAImpl(2, 8, 1.0, 1).forward(
        torch.ones(3, 2, 8), *caches, metadata, torch.full((3, 2, 8), math.nan)
    )
    assert output[:2].eq(0).all()
    assert output[2].eq(1).all()


def test_empty_batch() -> None:
    scenario = Scenario([], [])
    metadata = AscendFAMetadataBuilder(16).build(scenario.batch().padded(1, 3))
    caches = (scenario.key_cache, scenario.value_cache)
    query = torch.full((3, 4, 16), math.nan)
    output = layer_of(scenario).forward(query, *caches, metadata, query.clone())
    assert torch.count_nonzero(output) == 0


class TestBuilder:
    def test_builds_without_reading_the_device(self) -> None:
        batch = AttentionBatch.from_lengths([3, 1], [5, 17], 16, device="meta")
        batch = attrs.evolve(batch, query_start_loc_cpu=None, seq_lens_cpu=None)
        metadata = AscendFAMetadataBuilder(16).build(batch)
        assert metadata.query_starts.shape == (3,)
        assert metadata.seq_lens.device.type == "meta"

    def test_shares_no_memory_with_the_batch(self) -> None:
        batch = AttentionBatch.from_lengths([3, 1], [5, 17], 16)
        metadata = AscendFAMetadataBuilder(16).build(batch)
        for name in ("seq_lens", "block_table", "slot_mapping"):
            getattr(batch, name).zero_()
        batch.query_start_loc.fill_(9)
        assert metadata.seq_lens.tolist() == [5, 17]
        assert metadata.query_starts.tolist() == [0, 3, 4]
        assert metadata.block_table.tolist() == [[0, 0], [1, 2]]
        assert metadata.slot_mapping.tolist() == [2, 3, 4, 32]

    def test_stale_lengths_never_leave_their_block_row(self) -> None:
        batch = AttentionBatch.from_lengths([1, 1], [32, 5], 16)
        batch.seq_lens.copy_(torch.tensor([300, -4]))
        metadata = AscendFAMetadataBuilder(16).build(attrs.evolve(batch, seq_lens_cpu=None))
        assert metadata.seq_lens.tolist() == [32, 0]

    def test_a_row_that_is_too_narrow_is_an_error(self) -> None:
        batch = AttentionBatch.from_lengths([1], [32], 16)
        longer = attrs.evolve(batch, seq_lens_cpu=torch.tensor([33], dtype=torch.int32))
        with pytest.raises(AttentionBatchError, match=r"block_table: found 2 columns.*at least 3"):
            AscendFAMetadataBuilder(16).build(longer)

    def test_one_causality_for_the_step(self) -> None:
        batch = AttentionBatch.from_lengths([1, 1], [5, 17], 16, causal=[True, False])
        with pytest.raises(AttentionBatchError, match="causal: found one value per request"):
            AscendFAMetadataBuilder(16).build(batch)


class TestPackage:
    @pytest.mark.parametrize("name", ["flash_attn_npu_3", "flash_attn_npu_v3"])
    def test_the_exact_call(self, name: str) -> None:
        """Names, shapes, dtypes; against the documents of flash_attn_with_kvcache (0.4)."""
        scenario = Scenario(*MIXED, block_size=128, head_size=64, dtype=torch.bfloat16)
        with stand_in(name) as double:
            output = run_fa3(scenario, provider="flash_attn_npu")
        scenario.compare(output)
        ((args, kwargs),) = double.calls
        pages = (scenario.key_cache.shape[0], 128, 2, 64)
        assert [tuple(tensor.shape) for tensor in args] == [(27, 4, 64), pages, pages]
        assert args[1].data_ptr() == scenario.key_cache.data_ptr()  # no copy of the cache
        assert all(tensor.is_contiguous() for tensor in args)
        lengths = {name: kwargs.pop(name) for name in ("cache_seqlens", "cu_seqlens_q")}
        assert {name: (t.dtype, t.tolist()) for name, t in lengths.items()} == {
            "cache_seqlens": (torch.int32, MIXED[1]),
            "cu_seqlens_q": (torch.int32, [0, 1, 5, 17, 26, 27]),
        }
        table = kwargs.pop("page_table")
        assert table.dtype == torch.int32
        assert torch.equal(table, scenario.block_table)
        assert kwargs == {
            "max_seqlen_q": 12,
            "softmax_scale": 0.125,
            "causal": True,
            "window_size": (-1, -1),
            "num_splits": 1,
        }

    @given(steps(), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
    def test_package_and_reference_agree(
        self, step: tuple[list[int], list[int]], causal: bool, dtype: torch.dtype
    ) -> None:
        scenario = Scenario(*step, 16, causal=causal, dtype=dtype, head_size=64)
        with stand_in():
            found = run_fa3(scenario, provider="flash_attn_npu")
        torch.testing.assert_close(found, run_fa3(scenario), **TOLERANCES[dtype])

    @pytest.mark.parametrize("apart", [2, 3])
    def test_blocks_with_other_memory_between_them(self, apart: int) -> None:
        """Keys and values of a block side by side: the kernels know no block stride."""
        scenario = Scenario(*MIXED, block_size=16)
        expected = run_fa3(scenario)
        blocks = scenario.key_cache.shape[0]
        memory = torch.full((blocks, apart, 16, 2, 16), math.nan)
        memory[:, 0] = scenario.key_cache.transpose(1, 2)
        memory[:, 1] = scenario.value_cache.transpose(1, 2)
        scenario.key_cache, scenario.value_cache = (
            memory[:, place].transpose(1, 2) for place in (0, 1)
        )
        with stand_in() as double:
            output = run_fa3(scenario, provider="flash_attn_npu")
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        ((args, kwargs),) = double.calls
        assert args[1].is_contiguous()
        assert args[1].shape[0] == (blocks - 1) * apart + 1
        assert torch.equal(kwargs["page_table"], scenario.block_table * apart)

    @pytest.mark.parametrize(("kv_heads", "blocks"), [(1, 3), (1, 1), (2, 1)])
    def test_single_heads_and_single_blocks(self, kv_heads: int, blocks: int) -> None:
        """Strides of dimensions of one element say nothing."""
        scenario = Scenario([3], [20 if blocks > 1 else 9], kv_heads=kv_heads, spare_blocks=0)
        memory = torch.zeros(scenario.key_cache.shape[0], 2, 16, kv_heads, 16)
        for place, name in enumerate(("key_cache", "value_cache")):
            memory[:, place] = getattr(scenario, name).transpose(1, 2)
            setattr(scenario, name, memory[:, place].transpose(1, 2))
        expected = run_fa3(scenario)
        with stand_in():
            output = run_fa3(scenario, provider="flash_attn_npu")
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)

    def test_control_the_stand_in_ignores_block_strides(self) -> None:
        """As the kernels do: strided blocks handed over as they are give other numbers."""
        memory = torch.randn(4, 2, 16, 2, 16)
        args = (torch.randn(1, 4, 16), memory[:, 0], memory[:, 1])
        table = torch.tensor([[2]], dtype=torch.int32)
        lengths = {
            "cache_seqlens": torch.tensor([9]), "cu_seqlens_q": torch.tensor([0, 1]),
            "softmax_scale": 1.0, "causal": True,
        }  # fmt: skip
        with stand_in() as double:
            wrong = double.flash_attn_with_kvcache(*args, page_table=table, **lengths)
            dense = (args[0], args[1].contiguous(), args[2].contiguous())
            right = double.flash_attn_with_kvcache(*dense, page_table=table, **lengths)
        assert not torch.allclose(wrong, right)

    @pytest.mark.parametrize("kind", ["head-major", "one buffer per head", "uneven distance"])
    def test_memory_that_the_kernels_cannot_read_is_named(self, kind: str) -> None:
        scenario = Scenario([3], [20], token_major=kind != "head-major")
        if kind == "one buffer per head":
            both = torch.cat([scenario.key_cache, scenario.value_cache], dim=-1)
            scenario.key_cache, scenario.value_cache = both.chunk(2, dim=-1)
        elif kind == "uneven distance":
            memory = torch.zeros(5, 24, 2, 16)
            scenario.key_cache = memory[:, :16].transpose(1, 2)
        run_fa3(scenario)  # the reference reads any memory
        with stand_in(), pytest.raises(InvalidFieldError, match="key_cache: found strides"):
            run_fa3(scenario, provider="flash_attn_npu")

    def test_different_distances_of_keys_and_values_are_named(self) -> None:
        scenario = Scenario([3], [20])
        memory = torch.zeros(scenario.key_cache.shape[0], 2, 16, 2, 16)
        scenario.value_cache = memory[:, 1].transpose(1, 2)
        with stand_in(), pytest.raises(InvalidFieldError, match="value_cache: found blocks 2 pag"):
            run_fa3(scenario, provider="flash_attn_npu")

    def test_a_missing_package_is_one_clear_error(self) -> None:
        with pytest.raises(
            ProviderUnavailableError, match=r"flash-attn-npu is not installed.*pip install"
        ):
            run_fa3(Scenario([1], [5]), provider="flash_attn_npu")

    def test_a_package_that_cannot_be_imported_is_one_clear_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the package does on a machine without an NPU."""
        message = "Unsupported Ascend device: None"

        def broken(name: str) -> ModuleType:
            raise RuntimeError(message)

        with stand_in():
            monkeypatch.setattr(importlib, "import_module", broken)
            with pytest.raises(ProviderUnavailableError, match=f"cannot be imported: {message}"):
                run_fa3(Scenario([1], [5]), provider="flash_attn_npu")

    def test_a_package_without_the_function_is_one_clear_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn_npu_3", ModuleType("flash_attn_npu_3"))
        with pytest.raises(ProviderUnavailableError, match="no flash_attn_with_kvcache"):
            run_fa3(Scenario([1], [5]), provider="flash_attn_npu")

    def test_cpu_tensors_go_to_the_reference_unless_asked(self) -> None:
        with stand_in() as double:
            run_fa3(Scenario([1], [5]))
            assert double.calls == []
            run_fa3(Scenario([1], [5]), provider="flash_attn_npu")
            assert len(double.calls) == 1
            run_fa3(Scenario([1], [5]), provider="reference")
            assert len(double.calls) == 1

    @pytest.mark.parametrize(
        ("context", "installed", "expected"),
        [
            (None, True, "flash_attn_npu"),
            (None, False, "reference"),
            ("cpu", True, "reference"),
            ("reference", True, "reference"),
            ("cpu,torch_npu", True, "reference"),
            ("torch_npu", True, "flash_attn_npu"),
        ],
    )
    def test_npu_tensors_go_to_the_package(
        self, context: str | None, installed: bool, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if installed:
            monkeypatch.setitem(sys.modules, "flash_attn_npu_3", ModuleType("flash_attn_npu_3"))
        layer = layer_of(Scenario([1], [5]))
        if context is None:
            assert layer._provider("npu") == expected
        else:
            with use_provider(context):
                assert layer._provider("npu") == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 4}, "sliding_window: found 4; allowed: None"),
        ({"provider": "cuda"}, "provider: found cuda; allowed: None, flash_attn_npu or reference"),
    ],
)
def test_wrong_layers_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        AscendFAImpl(4, 16, 1.0, **options)


@pytest.mark.parametrize("profile", ["A2", "A3", "A5"])
def test_results_do_not_depend_on_the_profile(profile: str) -> None:
    scenario = Scenario(*MIXED)
    expected = run_fa3(scenario)
    with use_profile(profile):
        assert torch.equal(run_fa3(scenario), expected)


def test_the_callers_output_is_written_in_place() -> None:
    scenario = Scenario([3, 1], [20, 9])
    run_fa3(scenario)
    whole = torch.full((9, 64), math.nan)
    view = whole[2:6].unflatten(1, (4, 16))
    caches = (scenario.key_cache, scenario.value_cache)
    metadata = AscendFAMetadataBuilder(16).build(scenario.batch())
    layer_of(scenario).forward(padded(scenario.query, 4), *caches, metadata, view)
    scenario.compare(view)
    assert whole[:2].isnan().all()
    assert whole[6:].isnan().all()


def test_cache_shape_is_the_standard_one() -> None:
    shape = AscendFABackend.cache_shape(4, 128, 8, 64)
    assert shape.logical == (4, 8, 128, 64)
