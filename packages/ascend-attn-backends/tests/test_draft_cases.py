"""Public bug reports about drafts as small cases; the number is the report's row.

| row | report |
|----:|---|
| 1 | vllm-ascend 14883: draft steps saw the keys of rejected tokens |
| 2 | vllm 26498, 29845: padded drafting wrote and saw rejected slots |
| 4 | vllm-ascend 7549: building step 2 rewrote step 1 |
| 5 | vllm-ascend 9605, 10878: positions of one step were reused by the next |
| 22 | vllm-ascend 11774, 9818, 10901: an idle run wrote through stale slots |
| 25 | vllm-ascend 9221, vllm 16087, 24662, 57941: positions past the draft's maximum |
| 29 | vllm-ascend 8508: wrong mask mode of a sliding window in decode |
| 30 | transformers 39408, vllm 3385, zml 763: window off by one |
| 32 | vllm-ascend 11266: causality dropped for decode with several tokens |
| 33 | vllm-ascend 6469: the caller's output buffer stayed unchanged |
| 40 | vllm 53982: reads past the end of a block row |
| 64 | vllm-ascend 18961: repeated and negative query starts |

Row 6 (a gather and a persistent buffer had to share an address) cannot arise: this backend runs
eager and keeps no persistent buffer; its metadata are new tensors each step (row 4).
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from attn_backends_support import Scenario
from draft_flash_support import device_only, layer_of, run_draft
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    PAD_SLOT,
    AscendFlashAttentionMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    DraftStep,
    InvalidFieldError,
    draft_step,
    keep_accepted,
)


def rejected(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32)


def seen_keys(batch: AttentionBatch, num_rejected: torch.Tensor | None = None) -> list[int]:
    metadata = AscendFlashAttentionMetadataBuilder(16).build(device_only(batch), num_rejected)
    return metadata.lengths.seq_lens.tolist()


def steps_after(
    batch: AttentionBatch, gone: torch.Tensor, count: int, max_model_len: int = 4096
) -> list[DraftStep]:
    """The draft steps of one token per request."""
    return [
        draft_step(
            batch, gone, offset=offset, query_len=1, block_size=16, max_model_len=max_model_len
        )
        for offset in range(count)
    ]


def test_case_01_draft_steps_see_47_48_49_keys() -> None:
    table = torch.arange(8, dtype=torch.int32)[None]
    verified = AttentionBatch.from_lengths([4], [50], 16, block_table=table)
    gone = rejected(3)
    seen = [seen_keys(verified, gone)]
    seen += [seen_keys(s.batch, s.num_unused) for s in steps_after(verified, gone, 2)]
    assert seen == [[47], [48], [49]]
    assert [s.positions.tolist() for s in steps_after(verified, gone, 2)] == [[47], [48]]
    assert seen_keys(verified) == [50]  # control: without the count the rejected ones are there


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 60), st.integers(0, 9)), min_size=1,
             max_size=6),
    st.integers(1, 8),
)  # fmt: skip
def test_case_01_any_number_of_rejected_tokens(
    requests: list[tuple[int, int, int]], k: int
) -> None:
    query_lens = [query for query, _, _ in requests]
    seq_lens = [query + computed for query, computed, _ in requests]
    gone = [min(count, query - 1) for query, _, count in requests]
    table = torch.arange(len(requests) * 8, dtype=torch.int32).view(-1, 8)
    verified = AttentionBatch.from_lengths(query_lens, seq_lens, 16, block_table=table)
    kept = [n - count for n, count in zip(seq_lens, gone, strict=True)]
    assert seen_keys(verified, rejected(*gone)) == kept
    for number, step in enumerate(steps_after(verified, rejected(*gone), k), 1):
        assert seen_keys(step.batch, step.num_unused) == [n + number for n in kept]
        assert step.positions.tolist() == [n + number - 1 for n in kept]
        expected = [8 * row * 16 + n + number - 1 for row, n in enumerate(kept)]
        assert step.batch.slot_mapping.tolist() == expected


@pytest.mark.parametrize("k", [3, 10])
def test_case_02_padded_drafting_equals_unpadded(k: int) -> None:
    """k = 10 with 6 rejected, beside requests with none and all rejected."""
    gone = [min(6, k - 1), 0, k]
    whole = Scenario([k + 1] * 3, [40 + k, 20 + k, 70], head_size=64, seed=3)
    kept_lens = [k + 1 - count for count in gone]
    plain = Scenario([k + 1] * 3, [40 + k, 20 + k, 70], head_size=64, seed=3)
    rows = torch.cat([torch.arange(k + 1) < kept for kept in kept_lens])
    plain.query, plain.query_lens = plain.query[rows], kept_lens
    plain.seq_lens = [n - count for n, count in zip(plain.seq_lens, gone, strict=True)]
    plain.keys = [keys[:n] for keys, n in zip(plain.keys, plain.seq_lens, strict=True)]
    plain.values = [v[:n] for v, n in zip(plain.values, plain.seq_lens, strict=True)]
    padded = run_draft(whole, num_rejected=rejected(*gone))
    assert torch.allclose(padded[rows], run_draft(plain), rtol=1e-6, atol=1e-6)
    assert torch.equal(whole.key_cache, plain.key_cache)
    assert torch.equal(whole.value_cache, plain.value_cache)
    stale = Scenario([k + 1] * 3, [40 + k, 20 + k, 70], head_size=64, seed=3)
    run_draft(stale)  # control: without the count the rejected tokens are written
    assert not torch.equal(stale.key_cache, plain.key_cache)


def test_case_02_rejected_slots_are_the_pad_slot() -> None:
    batch = AttentionBatch.from_lengths([4, 1, 3], [20, 33, 3], 16).padded(4, 10)
    slots, given_slots = keep_accepted(batch, rejected(3, 0, 1)).tolist(), batch.slot_mapping
    expected = given_slots.tolist()
    for token in (1, 2, 3, 7):
        expected[token] = PAD_SLOT
    assert slots == expected
    metadata = AscendFlashAttentionMetadataBuilder(16).build(batch, rejected(3, 0, 1))
    assert metadata.slot_mapping.tolist() == expected
    assert given_slots.tolist() != expected  # the batch itself is untouched


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)]
)
def test_case_02_counts_that_do_not_fit_are_named(wrong: torch.Tensor) -> None:
    batch = AttentionBatch.from_lengths([1, 1], [5, 5], 16)
    calls = [
        lambda: keep_accepted(batch, wrong),
        lambda: AscendFlashAttentionMetadataBuilder(16).build(batch, wrong),
        lambda: steps_after(batch, wrong, 1),
    ]
    for call in calls:
        with pytest.raises(AttentionBatchError, match="num_rejected: found"):
            call()


def contents(step: DraftStep) -> list[Any]:
    tensors = (step.positions, step.num_unused, step.batch.seq_lens, step.batch.slot_mapping,
               step.batch.block_table)  # fmt: skip
    return [tensor.tolist() for tensor in tensors]


def test_case_04_a_later_step_changes_no_earlier_one() -> None:
    """All steps are built before the first runs; then every input is overwritten."""
    batch = AttentionBatch.from_lengths([4, 4], [50, 20], 16)
    batch = attrs.evolve(batch, block_table=torch.arange(10, dtype=torch.int32).view(2, 5))
    gone = rejected(3, 1)
    alone = [contents(steps_after(batch, gone, k + 1)[k]) for k in range(3)]
    together = steps_after(batch, gone, 3)
    built = [AscendFlashAttentionMetadataBuilder(16).build(s.batch, s.num_unused) for s in together]
    seen = [m.lengths.seq_lens.tolist() for m in built]
    for tensor in (batch.seq_lens, batch.block_table, batch.slot_mapping, gone):
        tensor.fill_(1)
    assert [contents(step) for step in together] == alone
    together[0].batch.seq_lens.zero_()
    together[0].batch.block_table.zero_()
    assert [m.lengths.seq_lens.tolist() for m in built] == seen == [[48, 20], [49, 21], [50, 22]]
    assert built[0].block_table.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_case_05_each_step_has_positions_of_its_own() -> None:
    batch = AttentionBatch.from_lengths(
        [1], [7], 16, block_table=torch.arange(2, dtype=torch.int32)[None]
    )
    steps = steps_after(batch, rejected(0), 3)
    assert [step.positions.tolist() for step in steps] == [[7], [8], [9]]
    assert len({step.positions.data_ptr() for step in steps}) == 3


def test_case_22_an_idle_draft_run_writes_nothing() -> None:
    scenario = Scenario([5, 1], [5, 20], head_size=64)
    run_draft(scenario)
    before = [scenario.key_cache.clone(), scenario.value_cache.clone()]
    idle = AttentionBatch.dummy(num_reqs=4, query_len=8, max_blocks=2)
    metadata = AscendFlashAttentionMetadataBuilder(16).build(device_only(idle))
    rows, caches = torch.ones(32, 2, 64), (scenario.key_cache, scenario.value_cache)
    layer = layer_of(scenario)
    layer.write_kv(rows, rows, *caches, metadata.slot_mapping)
    output = torch.empty(32, 4, 64)
    layer.forward(torch.ones(32, 4, 64), *caches, metadata, output)
    for cache, saved in zip(caches, before, strict=True):
        assert torch.equal(cache, saved)


@pytest.mark.parametrize("query_len", [1, 4])
def test_case_25_nothing_passes_the_drafts_last_position(query_len: int) -> None:
    """The draft has 2,048 positions, the target goes on; requests at 2047, 2050 and 100."""
    table = torch.zeros(3, 256, dtype=torch.int32)
    verified = AttentionBatch.from_lengths([1] * 3, [2047, 2050, 100], 16, block_table=table)
    rope = torch.arange(2048.0)
    for offset in range(3):
        step = draft_step(
            verified, rejected(0, 0, 0), offset=offset, query_len=query_len, block_size=16,
            max_model_len=2048,
        )  # fmt: skip
        wanted = torch.tensor([[n + offset + i for i in range(query_len)]
                               for n in (2047, 2050, 100)])  # fmt: skip
        assert rope[step.positions].tolist() == wanted.clamp(max=2047).flatten().tolist()
        slots = step.batch.slot_mapping.view(3, query_len)
        assert torch.equal(slots == PAD_SLOT, wanted > 2047)
        ends = [min(n + offset + query_len, 2048) for n in (2047, 2050, 100)]
        assert seen_keys(step.batch, step.num_unused) == ends


def test_case_25_the_tokens_that_fit_are_exact() -> None:
    """A block draft that ends at the last position: its other tokens count for nothing."""
    scenario = Scenario([2], [18], head_size=64, causal=False)
    expected = run_draft(scenario)
    longer = Scenario([4], [20], head_size=64, causal=False)
    longer.query[:2] = scenario.query
    longer.keys[0][:18], longer.values[0][:18] = scenario.keys[0], scenario.values[0]
    longer.block_table, longer.key_cache, longer.value_cache = (
        scenario.block_table, scenario.key_cache, scenario.value_cache,
    )  # fmt: skip
    verified = AttentionBatch.from_lengths([1], [16], 16, block_table=scenario.block_table)
    step = draft_step(
        verified, rejected(0), offset=0, query_len=4, block_size=16, max_model_len=18, causal=False
    )
    output = run_draft(longer, step.batch, num_rejected=step.num_unused)
    assert torch.allclose(output[:2], expected, rtol=1e-6, atol=1e-6)
    assert torch.count_nonzero(output[2:]) == 0


def keys_seen(scenario: Scenario) -> list[list[int]]:
    """Keys that each query token attends to: equal scores, one-hot values."""
    scenario.query.zero_()
    for row, length in enumerate(scenario.seq_lens):
        scenario.values[row] = torch.eye(scenario.head_size)[:length, None]
        for position in range(length - scenario.query_lens[row]):
            scenario.place(row, position)
    return [row.nonzero().flatten().tolist() for row in run_draft(scenario)[:, 0]]


def test_case_29_a_window_of_4_sees_the_last_4_keys_in_decode() -> None:
    scenario = Scenario([1] * 3, [10] * 3, heads=1, kv_heads=1, head_size=64, window=4)
    assert keys_seen(scenario) == [[6, 7, 8, 9]] * 3


@pytest.mark.parametrize(("query_len", "seq_len"), [(5, 5), (3, 9), (1, 9)])
def test_case_30_a_window_of_1_sees_only_itself(query_len: int, seq_len: int) -> None:
    scenario = Scenario([query_len], [seq_len], heads=1, kv_heads=1, head_size=64, window=1)
    assert keys_seen(scenario) == [[seq_len - query_len + i] for i in range(query_len)]


@pytest.mark.parametrize("k", range(1, 9))
def test_case_32_several_tokens_per_request_stay_causal(k: int) -> None:
    scenario = Scenario([k + 1, k + 1, 1], [20, k + 1, 30], head_size=64)
    scenario.compare(run_draft(scenario))
    with pytest.raises(AssertionError):  # control
        scenario.compare(run_draft(scenario, scenario.batch(causal=False)))


def test_case_33_the_callers_output_is_written_and_returned() -> None:
    scenario = Scenario([3, 1], [20, 9], head_size=64)
    expected = run_draft(scenario)
    metadata = AscendFlashAttentionMetadataBuilder(16).build(device_only(scenario.batch()))
    output = torch.zeros(4, 4, 64)
    address = output.data_ptr()
    caches = (scenario.key_cache, scenario.value_cache)
    assert layer_of(scenario).forward(scenario.query, *caches, metadata, output) is output
    assert output.data_ptr() == address
    assert torch.equal(output, expected)


def test_case_40_lengths_never_leave_their_block_row() -> None:
    """A stale length of 300 keys in a row of two blocks reads the row's 32 slots and no more."""
    batch = AttentionBatch.from_lengths([1, 1], [32, 5], 16)
    batch.seq_lens[0] = 300
    assert seen_keys(batch) == [32, 5]
    table = torch.arange(2, dtype=torch.int32)[None]
    full = AttentionBatch.from_lengths([1], [32], 16, block_table=table)
    (step,) = steps_after(full, rejected(0), 1)
    assert step.batch.slot_mapping.tolist() == [PAD_SLOT]
    assert seen_keys(step.batch, step.num_unused) == [32]


def test_case_64_dirty_starts_become_empty_rows() -> None:
    batch = AttentionBatch.from_lengths([3, 2, 1, 1], [20, 9, 5, 30], 16)
    batch.query_start_loc.copy_(torch.tensor([0, 3, 3, -1, 7]))
    metadata = AscendFlashAttentionMetadataBuilder(16).build(device_only(batch))
    assert metadata.lengths.query_starts.tolist() == [0, 3, 3, 3, 7]
    assert batch.query_start_loc.tolist() == [0, 3, 3, -1, 7]


def test_case_64_rows_beside_dirty_ones_are_right() -> None:
    """Rows 1 and 2 are idle: a repeated start, a negative start, lengths of 0 and below."""
    clean = Scenario([3, 4], [20, 30], head_size=64)
    expected = run_draft(clean)
    dirty = Scenario([3, 4], [20, 30], head_size=64)
    good = dirty.batch()
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, 3, 3, -1, 7], dtype=torch.int32),
        seq_lens=torch.tensor([20, 0, -5, 30], dtype=torch.int32),
        block_table=good.block_table[[0, 0, 0, 1]],
        slot_mapping=good.slot_mapping,
        num_reqs=4,
        num_tokens=7,
        max_query_len=4,
        max_seq_len=30,
    )
    assert torch.equal(run_draft(dirty, batch), expected)
    clean.compare(expected)


@given(
    st.lists(st.integers(-5, 40), min_size=1, max_size=8),
    st.integers(0, 20),
    st.lists(st.integers(-5, 90), min_size=8, max_size=8),
)
def test_case_64_any_starts_and_lengths_are_repaired(
    starts: list[int], num_tokens: int, keys: list[int]
) -> None:
    rows = len(starts)
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, *starts], dtype=torch.int32),
        seq_lens=torch.tensor(keys[:rows], dtype=torch.int32),
        block_table=torch.zeros(rows, 4, dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        num_reqs=rows,
        num_tokens=num_tokens,
        max_query_len=num_tokens,
        max_seq_len=64,
    )
    lengths = AscendFlashAttentionMetadataBuilder(16).build(batch).lengths
    found = lengths.query_starts.tolist()
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == min(max(0, *starts), num_tokens)
    assert all(1 <= n <= 64 for n in lengths.seq_lens.tolist())


@pytest.mark.parametrize("change", [{"offset": -1}, {"query_len": 0}, {"max_model_len": 0}])
def test_impossible_steps_are_named(change: dict[str, int]) -> None:
    batch = AttentionBatch.from_lengths([1], [5], 16)
    arguments = {"offset": 0, "query_len": 1, "block_size": 16, "max_model_len": 64} | change
    (name,) = change
    with pytest.raises(InvalidFieldError, match=f"{name}: found"):
        draft_step(batch, rejected(0), **arguments)
