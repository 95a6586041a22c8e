"""Public bug reports of systems of this kind, as small cases; the number is the report's row.

| row | report |
|----:|---|
| 4 | vllm-ascend 7549: building step 2 rewrote step 1 |
| 7 | vllm-ascend 12079, 12630: a host buffer was refilled before its asynchronous copy ran |
| 13 | vllm-ascend 10769, 7986, 9867: padding added a row to one field only |
| 15 | vllm-ascend 6835, 8029, 8263: a prompt of k + 1 tokens was taken for a decode |
| 16 | vllm-ascend 10580: the small last chunk of a prompt was taken for a decode |
| 22 | vllm-ascend 11774, 9818, 10901: an idle run wrote through stale slots |
| 29 | vllm-ascend 8508: wrong mask mode of a sliding window in decode |
| 30 | transformers 39408, vllm 3385, zml 763: window off by one |
| 32 | vllm-ascend 11266: causality dropped for decode with several tokens |
| 33 | vllm-ascend 6469: the caller's output buffer stayed unchanged |
| 39 | vllm 50427, 47671: block id times page stride in 32 bits |
| 40 | vllm 53982: reads past the end of a block row |
| 59 | vllm-ascend 11790, 12025, 11986: key and value views that are not contiguous |
| 63 | vllm-ascend 7452: causal pooling ignored cached keys |
| 64 | vllm-ascend 18961: repeated and negative query starts |
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from attn_backends_support import Scenario, visible
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_attn_backends import (
    AscendAttentionMetadataBuilder,
    AscendMetadata,
    AttentionBatch,
    AttentionBatchError,
    InvalidFieldError,
    copy_to_device,
    element_offsets,
    prefill_flags,
    repair_starts,
    slots_for_positions,
)


def contents(metadata: AscendMetadata) -> list[Any]:
    """Every value of the metadata, as plain data."""
    calls = [
        (
            call.causal,
            call.query_lens_cumulative,
            call.seq_lens,
            call.block_table.tolist(),
            None if call.token_indices is None else call.token_indices.tolist(),
            call.token_slice,
        )
        for call in metadata.launches
    ]
    return [metadata.num_tokens, metadata.max_seq_len, metadata.slot_mapping.tolist(), calls]


class RunnerBuffers:
    """A runner that refills the same tensors for every step, as real ones do."""

    def __init__(self) -> None:
        self.starts = torch.zeros(3, dtype=torch.int32)
        self.lens = torch.zeros(2, dtype=torch.int32)
        self.table = torch.zeros(2, 8, dtype=torch.int32)
        self.slots = torch.zeros(8, dtype=torch.int64)
        self.causal = torch.ones(2, dtype=torch.bool)

    def step(self, number: int) -> AttentionBatch:
        self.starts.copy_(torch.tensor([0, 1 + number, 3 + number]))
        self.lens.copy_(torch.tensor([20 + number, 40 + number]))
        self.table.copy_(torch.arange(16).view(2, 8).roll(number, 1))
        self.slots.copy_(torch.arange(8) + 10 * number)
        self.causal.copy_(torch.tensor([number % 2 == 0, True]))
        return AttentionBatch(
            query_start_loc=self.starts,
            seq_lens=self.lens,
            block_table=self.table,
            slot_mapping=self.slots[: 3 + number],
            num_reqs=2,
            num_tokens=3 + number,
            max_query_len=1 + number if number else 2,
            max_seq_len=40 + number,
            causal=self.causal,
        )


@pytest.mark.parametrize("count", [2, 5])
def test_case_04_building_a_step_never_changes_an_earlier_one(count: int) -> None:
    builder = AscendAttentionMetadataBuilder(16)
    shared = RunnerBuffers()
    built = [builder.build(shared.step(number)) for number in range(count)]
    for number, metadata in enumerate(built):
        alone = builder.build(RunnerBuffers().step(number))
        assert contents(metadata) == contents(alone)
    assert contents(built[0]) != contents(built[1])


def test_case_04_metadata_is_frozen_and_shares_no_memory_with_the_batch() -> None:
    scenario = Scenario([2, 3, 1], [20, 30, 40], causal=[True, False, True])
    batch = scenario.batch()
    metadata = scenario.build(batch)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        metadata.num_tokens = 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        metadata.launches[0].causal = False
    ours = [metadata.slot_mapping, *(call.block_table for call in metadata.launches)]
    theirs = [v for v in attrs.asdict(batch, recurse=False).values() if torch.is_tensor(v)]
    storages = {t.untyped_storage().data_ptr() for t in theirs}
    assert not storages & {t.untyped_storage().data_ptr() for t in ours}


class LateStream(TorchDispatchMode):
    """Executes asynchronous copies as late as it may: when their result is read, or at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waiting_at_end = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_copy = func is torch.ops.aten.copy_.default
        if is_copy and ((len(args) > 2 and args[2]) or kwargs.get("non_blocking")):
            self.waiting.append((args[0], args[1]))
            return args[0]
        targets = [target for target, _ in self.waiting]
        if any(argument is target for argument in args for target in targets):
            self.run()
        return func(*args, **kwargs)

    def run(self) -> None:
        """Execute what waits, in order."""
        while self.waiting:
            target, source = self.waiting.pop(0)
            target.copy_(source)


@contextmanager
def late_copies() -> Iterator[LateStream]:
    with LateStream() as stream:
        yield stream
        stream.waiting_at_end = len(stream.waiting)
    stream.run()


def test_case_07_the_device_sees_the_value_at_issue_time() -> None:
    host = torch.tensor([0, 3, 7])
    with late_copies() as stream:
        ours = copy_to_device(host, "cpu")
        naive = torch.empty_like(host).copy_(host, non_blocking=True)
        host.fill_(99)
    assert stream.waiting_at_end == 2
    assert ours.tolist() == [0, 3, 7]
    assert naive.tolist() == [99, 99, 99]  # control: the stream does show the fault


def test_case_07_batch_and_metadata_survive_a_refilled_host_buffer() -> None:
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    causal = [True, False, True, False]
    with late_copies() as stream:
        batch = AttentionBatch.from_lengths(
            [1, 2, 1, 3], [20, 20, 20, 20], 16, block_table=table, causal=causal
        )
        table.fill_(99)
    assert stream.waiting_at_end == 5
    assert batch.block_table.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with late_copies() as stream:
        metadata = AscendAttentionMetadataBuilder(16).build(batch)
        for name in ("query_start_loc_cpu", "seq_lens_cpu", "causal_cpu"):
            getattr(batch, name).fill_(0)
    assert stream.waiting_at_end > 0
    assert [call.query_lens_cumulative for call in metadata.launches] == [(1, 2), (2, 5)]
    assert metadata.launches[0].token_indices.tolist() == [0, 3]
    assert metadata.launches[1].token_indices.tolist() == [1, 2, 4, 5, 6]


def test_case_13_padding_adds_a_row_to_every_field_or_to_none() -> None:
    batch = AttentionBatch.from_lengths([2] * 17 + [1] * 3, [40] * 20, 16)
    assert (batch.num_reqs, batch.num_tokens) == (20, 37)
    grown = batch.padded(21, 40)
    assert len(grown.query_start_loc) == 22
    assert len(grown.seq_lens) == len(grown.block_table) == 21
    assert len(grown.slot_mapping) == 40
    with pytest.raises(AttentionBatchError, match=r"seq_lens: found .*\[20\].*\[21\]"):
        attrs.evolve(grown, seq_lens=batch.seq_lens, seq_lens_cpu=None)


@pytest.mark.parametrize("k", range(1, 9))
def test_case_15_a_prompt_of_k_plus_1_tokens_is_a_prefill(k: int) -> None:
    query_lens, computed, prompts = [k + 1, 200, k + 1], [0, 0, 50], [k + 1, 200, 40]
    flags = prefill_flags(torch.tensor(computed), torch.tensor(prompts))
    seq_lens = [q + c for q, c in zip(query_lens, computed, strict=True)]
    batch = AttentionBatch.from_lengths(query_lens, seq_lens, 16, is_prefilling=flags.tolist())
    split = batch.split(k)
    assert split.prefill.rows == (0, 1)
    assert split.spec_decode.rows == (2,)
    assert split.decode.rows == ()


@pytest.mark.parametrize(("computed", "scheduled"), [(98, 2), (99, 1), (96, 4)])
def test_case_16_the_small_last_chunk_of_a_prompt_is_a_prefill(
    computed: int, scheduled: int
) -> None:
    flags = prefill_flags(torch.tensor([computed]), torch.tensor([100]))
    batch = AttentionBatch.from_lengths([scheduled], [100], 16, is_prefilling=flags.tolist())
    assert batch.split(3).prefill.rows == (0,)


def test_case_16_recomputation_of_generated_tokens_is_a_prefill() -> None:
    flags = prefill_flags(torch.tensor([101]), torch.tensor([100]), torch.tensor([True]))
    batch = AttentionBatch.from_lengths([2], [103], 16, is_prefilling=flags.tolist())
    assert batch.split(3).prefill.rows == (0,)


def test_case_22_an_idle_run_writes_nothing() -> None:
    scenario = Scenario([5, 1], [5, 20])
    scenario.run()
    before = [scenario.key_cache.clone(), scenario.value_cache.clone()]
    idle = AttentionBatch.dummy(num_reqs=4, query_len=1, max_blocks=2)
    metadata = scenario.build(idle)
    assert metadata.slot_mapping.tolist() == [-1] * 4
    assert torch.count_nonzero(metadata.launches[0].block_table) == 0
    rows = torch.ones(4, 2, 16)
    caches = (scenario.key_cache, scenario.value_cache)
    scenario.impl().write_kv(rows, rows, *caches, metadata.slot_mapping)
    output = scenario.impl().forward(torch.ones(4, 4, 16), *caches, metadata, torch.empty(4, 4, 16))
    assert output.shape == (4, 4, 16)
    for cache, saved in zip(caches, before, strict=True):
        assert torch.equal(cache.nan_to_num(-7.0), saved.nan_to_num(-7.0))


def test_case_22_padding_tokens_write_nothing() -> None:
    padded, plain = Scenario([5, 1], [5, 20]), Scenario([5, 1], [5, 20])
    padded.run(padded.batch().padded(4, 16))
    plain.run()
    for name in ("key_cache", "value_cache"):
        ours, expected = getattr(padded, name), getattr(plain, name)
        assert torch.equal(ours.nan_to_num(-7.0), expected.nan_to_num(-7.0))


def keys_seen(scenario: Scenario) -> list[list[int]]:
    """Keys that each query token attends to: equal scores, one-hot values."""
    scenario.query.zero_()
    for row, length in enumerate(scenario.seq_lens):
        scenario.values[row] = torch.eye(scenario.head_size)[:length, None]
        for position in range(length - scenario.query_lens[row]):
            scenario.place(row, position)
    return [row.nonzero().flatten().tolist() for row in scenario.run()[:, 0]]


@pytest.mark.parametrize("beside", [0, 3])
def test_case_29_a_window_of_4_sees_the_last_4_keys_in_decode(beside: int) -> None:
    scenario = Scenario(
        [1] * (beside + 1), [10] * (beside + 1), heads=1, kv_heads=1, head_size=64, window=4
    )
    assert keys_seen(scenario) == [[6, 7, 8, 9]] * (beside + 1)


@pytest.mark.parametrize(("query_len", "seq_len"), [(5, 5), (3, 9), (1, 9)])
def test_case_30_a_window_of_1_sees_only_itself(query_len: int, seq_len: int) -> None:
    scenario = Scenario([query_len], [seq_len], heads=1, kv_heads=1, head_size=64, window=1)
    assert keys_seen(scenario) == [[seq_len - query_len + i] for i in range(query_len)]


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("k", range(1, 9))
def test_case_32_verification_of_k_drafts_stays_causal(k: int, window: int | None) -> None:
    scenario = Scenario([k + 1, k + 1, 1], [20, k + 1, 30], window=window)
    assert all(call.causal for call in scenario.build().launches)
    scenario.compare(scenario.run())
    with pytest.raises(AssertionError):  # control: without the mask the numbers differ
        scenario.compare(scenario.run(scenario.batch(causal=False)))


def test_case_33_the_callers_output_is_written_and_returned() -> None:
    scenario = Scenario([3, 1], [20, 9])
    expected = scenario.run()
    output = torch.zeros(4, 4, 16)
    address = output.data_ptr()
    caches = (scenario.key_cache, scenario.value_cache)
    returned = scenario.impl().forward(scenario.query, *caches, scenario.build(), output)
    assert returned is output
    assert output.data_ptr() == address
    assert torch.equal(output, expected)
    assert torch.count_nonzero(output) > 0


def test_case_33_a_view_of_a_larger_output_is_written_in_place() -> None:
    scenario = Scenario([3, 1], [20, 9], causal=[True, False])
    expected = scenario.run()
    whole = torch.full((9, 64), math.nan)
    view = whole[2:6].unflatten(1, (4, 16))
    caches = (scenario.key_cache, scenario.value_cache)
    scenario.impl().forward(scenario.query, *caches, scenario.build(), view)
    assert torch.equal(whole[2:6], expected.flatten(1))
    assert whole[:2].isnan().all()
    assert whole[6:].isnan().all()


def test_case_39_offsets_of_large_pools_are_exact() -> None:
    blocks = torch.tensor([7768], dtype=torch.int32)
    assert element_offsets(blocks, 480 * 576).tolist() == [2_147_696_640]
    assert (blocks * (480 * 576)).tolist() != [2_147_696_640]  # control: 32 bits are not enough
    table = torch.tensor([[200_000_000]], dtype=torch.int32)
    slots = slots_for_positions(table, torch.tensor([0]), torch.tensor([5]), 16)
    assert slots.tolist() == [3_200_000_005]
    assert slots.dtype == torch.int64


def test_case_40_a_position_beyond_the_block_row_is_an_error() -> None:
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    with pytest.raises(InvalidFieldError, match=r"positions\[0\]: found 300; allowed: 0 to 255"):
        slots_for_positions(table, torch.tensor([0]), torch.tensor([300]), 128)
    with pytest.raises(AttentionBatchError, match=r"block_table: found 2 columns.*at least 3"):
        AttentionBatch.from_lengths([1, 1], [301, 1], 128, block_table=table)
    batch = AttentionBatch.from_lengths([1, 1], [256, 1], 128, block_table=table)
    longer = attrs.evolve(batch, seq_lens_cpu=torch.tensor([257, 1], dtype=torch.int32))
    with pytest.raises(AttentionBatchError, match=r"block_table: found 2 columns.*at least 3"):
        AscendAttentionMetadataBuilder(128).build(longer)


def test_case_59_key_and_value_views_need_not_be_contiguous() -> None:
    scenario = Scenario([3, 2], [20, 9])
    expected = scenario.run()
    key, value = (
        scenario.new_tokens(history).transpose(0, 1).contiguous().transpose(0, 1)
        for history in (scenario.keys, scenario.values)
    )
    assert not key.is_contiguous()
    fresh = Scenario([3, 2], [20, 9])
    caches = (fresh.key_cache, fresh.value_cache)
    metadata = fresh.build()
    fresh.impl().write_kv(key, value, *caches, metadata.slot_mapping)
    output = fresh.impl().forward(fresh.query, *caches, metadata, torch.empty_like(expected))
    assert torch.equal(output, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_case_63_cached_keys_count_in_pooling(causal: bool) -> None:
    whole = Scenario([12], [12], causal=causal)
    expected = whole.run()[8:]
    chunk = Scenario([4], [12], causal=causal)
    chunk.query = whole.query[8:]
    chunk.keys, chunk.values = whole.keys, whole.values
    for position in range(8):
        chunk.place(0, position)
    output = chunk.run()
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    alone = Scenario([4], [4], causal=causal)  # control: attention that ignores the cached keys
    alone.query = whole.query[8:]
    alone.keys, alone.values = [whole.keys[0][8:]], [whole.values[0][8:]]
    assert not torch.allclose(alone.run(), expected, atol=1e-3)


def test_case_64_starts_are_repaired() -> None:
    starts = torch.tensor([0, 3, 3, -1, 7], dtype=torch.int32)
    assert repair_starts(starts, 7).tolist() == [0, 3, 3, 3, 7]


def test_case_64_rows_that_a_runner_left_dirty_compute_nothing() -> None:
    clean = Scenario([3, 0, 0, 4], [20, 0, 0, 9])
    expected = clean.run()
    dirty = Scenario([3, 0, 0, 4], [20, 0, 0, 9])
    batch = dirty.batch()
    starts = torch.tensor([0, 3, 3, -1, 7], dtype=torch.int32)
    lens = torch.tensor([20, -5, 0, 9], dtype=torch.int32)
    batch = attrs.evolve(
        batch,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu=lens,
    )
    metadata = dirty.build(batch)
    assert metadata.launches[0].query_lens_cumulative == (3, 3, 3, 7)
    assert metadata.launches[0].seq_lens == (20, 0, 0, 9)
    assert torch.equal(dirty.run(batch), expected)
    dirty.compare(dirty.run(batch))


def test_case_64_tokens_that_no_row_owns_give_zero() -> None:
    scenario = Scenario([3, 4], [20, 9])
    batch = scenario.batch()
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    batch = attrs.evolve(batch, query_start_loc=starts, query_start_loc_cpu=starts)
    assert torch.count_nonzero(scenario.run(batch)[5:]) == 0


def test_the_oracle_itself() -> None:
    """The mask definition that all comparisons rest on, written out once by hand."""
    assert visible(2, 4, causal=True, window=2).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible(2, 3, causal=True, window=None).int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert visible(2, 3, causal=False, window=2).int().tolist() == [[1, 1, 1], [0, 1, 1]]
