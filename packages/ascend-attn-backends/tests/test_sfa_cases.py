"""Public bug reports of systems of this kind, as small cases of sparse latent attention.

| row | report |
|----:|---|
| 1 | vllm-ascend 14883: draft steps saw the keys of rejected tokens |
| 28 | vllm-ascend 7341: interleaved rotation where half-split is needed |
| 33 | vllm-ascend 6469: the caller's output buffer stayed unchanged |
| 35 | vllm 28181, 39148: NaN when both parts are empty |
| 37 | vllm 49294: empty rows with a finite LSE |
| 38 | vllm 38416, 50484, flashinfer 4484: a rank that holds no keys |
| 39 | vllm 50427, 47671: block id times page stride in 32 bits |
| 40 | vllm 53982: reads past the end of a block row |
| 42 | mlx-lm 531, 512: no ReLU, choice per head instead of head-summed scores |
| 64 | vllm-ascend 18961: repeated and negative query starts |
"""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from sparse_oracle import SparseStep

from ascend_attn_backends import (
    AscendSFAImpl,
    AscendSFAIndexerImpl,
    AscendSFAIndexerMetadataBuilder,
    AscendSFAMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    IndexRope,
    rotate_index_rows,
)
from ascend_attn_ops import PartialAttention, merge_partials

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def test_case_01_shorter_lengths_hide_rejected_keys() -> None:
    """Length 50 after verification of k = 3 with 3 rejected: draft steps see 47, 48, 49 keys."""
    for seen in (47, 48, 49):
        step, twin = SparseStep([1], [50], top_k=64), SparseStep([1], [50], top_k=64)
        step.write(step.batch())
        batch = AttentionBatch.from_lengths([1], [seen], 16, block_table=step.block_table)
        (row,) = step.choose(batch)[:, 0].tolist()
        assert sorted(row, reverse=True)[:seen] == list(range(seen - 1, -1, -1))
        assert row[seen:] == [-1] * (64 - seen)
        twin.write(twin.batch())
        assert len([x for x in twin.choose()[0, 0].tolist() if x >= 0]) == 50


def test_case_28_both_rotations_exist_and_differ() -> None:
    """The report's vector, four elements wide; expected values by hand from the two formulas."""
    rows = torch.zeros(1, 1, 128)
    rows[..., :64] = torch.arange(1.0, 65)
    angle = torch.full((1, 32), 1.0)
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    half = rotate_index_rows(rows, cos, sin, IndexRope.HALF)[0, 0]
    interleaved = rotate_index_rows(rows, cos, sin, IndexRope.INTERLEAVED)[0, 0]
    c, s = math.cos(1.0), math.sin(1.0)
    assert half[0] == pytest.approx(1 * c - 33 * s, rel=1e-5)
    assert half[32] == pytest.approx(33 * c + 1 * s, rel=1e-5)
    assert interleaved[0] == pytest.approx(1 * c - 2 * s, rel=1e-5)
    assert interleaved[32] == pytest.approx(2 * c + 1 * s, rel=1e-5)
    assert not torch.allclose(half, interleaved)


def test_case_33_output_is_written_in_place() -> None:
    step = SparseStep([3], [20])
    step.write(step.batch())
    output = torch.zeros(3, 4, 512)
    address = output.data_ptr()
    caches = step.caches["latent"], step.caches["rope"]
    result = step.impl().forward(*step.query, *caches, step.choose(), step.build(), output)
    assert result is output
    assert output.data_ptr() == address
    assert output.any(-1).all()


def part(step: SparseStep, entries: torch.Tensor) -> PartialAttention:
    caches = step.caches["latent"], step.caches["rope"]
    return step.impl().forward_partial(*step.query, *caches, entries, step.build())


def test_case_35_two_empty_parts_merge_to_nothing() -> None:
    step = SparseStep([2], [9])
    step.write(step.batch())
    empty = torch.full((2, 1, 8), -1, dtype=torch.int32)
    merged = merge_partials([part(step, empty), part(step, empty)])
    assert not merged.out.any()
    assert merged.lse.isneginf().all()


def test_case_37_rows_without_keys_are_told_by_their_lengths() -> None:
    """Lengths [0, 5]: whatever the first request's row selects, it has no key to read."""
    step = SparseStep([1, 1], [1, 5])
    step.write(step.batch())
    chosen = torch.tensor([[[0, 1, 2]], [[0, 1, 2]]], dtype=torch.int32)
    metadata = step.build()
    lens = torch.tensor([0, 5], dtype=torch.int32)
    caches = step.caches["latent"], step.caches["rope"]
    found = step.impl().forward_partial(
        *step.query, *caches, chosen, attrs.evolve(metadata, seq_lens=lens)
    )
    assert not found.out[0].any()
    assert found.lse[0].isneginf().all()
    expected, _ = step.attention(1, [0, 1, 2])
    torch.testing.assert_close(found.out[1].double(), expected, **TOLERANCE)


def test_case_38_ranks_without_keys_are_neutral() -> None:
    """Four ranks hold every fourth key of requests of 2 and 9 keys."""
    step = SparseStep([1, 1], [2, 9], top_k=4)
    chosen, output = step.run()
    parts = []
    for rank in range(4):
        rows = [[x for x in row if x >= 0 and x % 4 == rank] for row in chosen[:, 0].tolist()]
        mine = torch.tensor([[row + [-1] * (4 - len(row))] for row in rows], dtype=torch.int32)
        parts.append(part(step, mine))
    assert any(bool(p.lse[0].isneginf().all()) for p in parts)
    torch.testing.assert_close(merge_partials(parts).out, output, **TOLERANCE)


def test_case_39_addresses_beyond_32_bits() -> None:
    """Block 7768 of 480 tokens of 576 elements starts at element 2 147 696 640 > 2**31 - 1.

    The pool is virtual memory: only the pages that are written exist.
    """
    block, size = 7768, 480
    assert block * size * 576 > 2**31 - 1
    pool = torch.empty(block + 1, 1, size, 576, dtype=torch.bfloat16)
    latent_cache, rope_cache = pool.split([512, 64], -1)
    impl = AscendSFAImpl(2, 0.1)
    table = torch.tensor([[block]], dtype=torch.int32)
    batch = AttentionBatch.from_lengths([3], [3], size, block_table=table)
    metadata = AscendSFAMetadataBuilder(size).build(batch)
    latent, rope = torch.randn(3, 512).bfloat16(), torch.randn(3, 64).bfloat16()
    impl.write_kv(latent, rope, latent_cache, rope_cache, metadata.slot_mapping)
    assert torch.equal(pool[block, 0, :3, :512], latent)
    chosen = torch.tensor([[[0, -1]], [[1, -1]], [[2, -1]]], dtype=torch.int32)
    query = torch.randn(3, 2, 512).bfloat16(), torch.randn(3, 2, 64).bfloat16()
    output = impl.forward(
        *query, latent_cache, rope_cache, chosen, metadata, torch.empty_like(query[0])
    )
    assert torch.equal(output, latent[:, None].expand(3, 2, 512))


class TestCase40:
    """A block row of 2 columns of 128 tokens, and position 300."""

    def batch(self, **changes: object) -> AttentionBatch:
        fields: dict[str, object] = {
            "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
            "seq_lens": torch.tensor([301, 200], dtype=torch.int32),
            "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
            "slot_mapping": torch.tensor([-1, -1]),
            "num_reqs": 2,
            "num_tokens": 2,
            "max_query_len": 1,
            "max_seq_len": 301,
            **changes,
        }
        return AttentionBatch(**fields)

    @pytest.mark.parametrize("builder", [AscendSFAMetadataBuilder, AscendSFAIndexerMetadataBuilder])
    def test_case_40_host_lengths_give_an_error(
        self, builder: type[AscendSFAMetadataBuilder]
    ) -> None:
        batch = self.batch(seq_lens_cpu=torch.tensor([301, 200], dtype=torch.int32))
        with pytest.raises(AttentionBatchError, match=r"block_table: found 2 columns; .* least 3"):
            builder(128).build(batch)

    def test_case_40_device_lengths_never_reach_the_next_row(self) -> None:
        metadata = AscendSFAMetadataBuilder(128).build(self.batch())
        assert metadata.seq_lens.tolist() == [256, 200]
        latent_cache, rope_cache = torch.zeros(4, 1, 128, 512), torch.zeros(4, 1, 128, 64)
        latent_cache[2:] = torch.nan
        chosen = torch.tensor([[[300, 260, 0]], [[-1, -1, -1]]], dtype=torch.int32)
        output = AscendSFAImpl(2, 0.1).forward(
            torch.ones(2, 2, 512),
            torch.ones(2, 2, 64),
            latent_cache,
            rope_cache,
            chosen,
            metadata,
            torch.full((2, 2, 512), torch.nan),
        )
        assert output.isfinite().all()


def test_case_42_one_choice_for_all_heads_from_rectified_sums() -> None:
    """Three keys and two heads, whose own winners are keys 0 and 1; together they choose key 2.

    Products: head 0 [3, -9, 2], head 1 [-9, 3, 2]. Rectified sums [3, 3, 4]; without the ReLU
    [-6, -6, 4]; adding a key with products [6, -4] tells a ReLU: 6 with it, 2 without.
    """
    keys = torch.tensor([[3.0, -9.0], [-9.0, 3.0], [2.0, 2.0], [6.0, -4.0]])
    cache = torch.zeros(1, 1, 16, 128)
    cache[0, 0, :4, :2] = keys
    query = torch.zeros(1, 2, 128)
    query[0, 0, 0] = query[0, 1, 1] = 1.0
    weights = torch.ones(1, 2)
    for length, winner in ((3, 2), (4, 3)):
        batch = AttentionBatch.from_lengths([1], [length], 16)
        metadata = AscendSFAIndexerMetadataBuilder(16).build(batch)
        chosen = AscendSFAIndexerImpl(2, 1).forward(query, weights, cache, metadata)
        assert chosen.tolist() == [[[winner]]]
    summed = keys.sum(-1)
    assert int(summed[:4].argmax()) == 2  # control: without the ReLU key 2 wins both times
    assert keys[:3].argmax(0).tolist() == [0, 1]  # control: each head alone chooses another key


def test_case_64_dirty_starts_are_repaired_on_the_device() -> None:
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, 3, 3, -1, 7], dtype=torch.int32),
        seq_lens=torch.tensor([3, 9, -4, 4], dtype=torch.int32),
        block_table=torch.arange(4, dtype=torch.int32)[:, None],
        slot_mapping=torch.full((7,), -1),
        num_reqs=4,
        num_tokens=7,
        max_query_len=4,
        max_seq_len=9,
    )
    metadata = AscendSFAMetadataBuilder(16).build(batch)
    assert metadata.query_ends.tolist() == [3, 3, 3, 7]
    assert metadata.seq_lens.tolist() == [3, 9, 0, 4]
