"""Public bug reports of systems of this kind, as small cases of compressed attention.

| row | report |
|----:|---|
| 1 | vllm-ascend 14883: draft steps saw the keys of rejected tokens |
| 5 | vllm-ascend 9605, 10878: rotary rows kept for another draft step (DeepSeek-V4 MTP) |
| 15 | vllm-ascend 6835, 8029, 8263: a prompt of k + 1 tokens looks like a verification |
| 22 | vllm-ascend 11774, 9818, 10901: idle runs wrote into the caches of real requests |
| 33 | vllm-ascend 6469: the caller's output buffer stayed unchanged |
| 39 | vllm 50427, 47671: block id times page stride in 32 bits |
| 40 | vllm 53982: reads past the end of a block row |
| 64 | vllm-ascend 18961: repeated and negative query starts |
"""

from __future__ import annotations

import attrs
import pytest
import torch
from dsa_oracle import HEAVY, KINDS, SPARSE, DsaStep

from ascend_attn_backends import (
    AscendDSACompressor,
    AscendDSAImpl,
    AscendDSAMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    CompressorWeights,
    DsaCompression,
    DsaTables,
)
from ascend_attn_ops import sanitize

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
COMPRESSING = ["sparse", "heavy"]


@pytest.mark.parametrize("kind", [*KINDS])
def test_case_01_shorter_lengths_hide_rejected_keys(kind: str) -> None:
    """Length 50 after verification of k = 3 with 3 rejected: draft steps see 47, 48, 49 keys."""
    whole = DsaStep([4], [50], KINDS[kind], num_spec_tokens=3)
    whole.run()
    for seen in (47, 48, 49):
        step = attrs.evolve(whole, query_lens=[1], seq_lens=[seen])
        for name in ("hidden", "kv", "weights", "caches", "states", "table", "tables", "sinks"):
            setattr(step, name, getattr(whole, name))
        step.hidden, step.kv = ([rows[0][:seen]] for rows in (whole.hidden, whole.kv))
        metadata = step.build()
        output = torch.empty(1, 4, 32)
        keys = step.keys(step.choose(metadata, 1))
        step.impl().forward(step.query, step.caches["window"], metadata, output, **keys)
        expected, _ = step.attention(0, step.best(0))
        torch.testing.assert_close(output[0].double(), expected, **TOLERANCE)
        if metadata.compressed is not None:
            ratio = metadata.compressed.compression.ratio
            assert metadata.compressed.key_lens.tolist() == [seen // ratio]
            assert metadata.compressed.residual_lens.tolist() == [seen % ratio]


@pytest.mark.parametrize("kind", COMPRESSING)
def test_case_05_each_step_has_rotary_positions_of_its_own(kind: str) -> None:
    """Three draft steps that each finish a group, read after all of them are built."""
    compression = KINDS[kind]
    assert compression is not None
    ratio = compression.ratio
    steps = [DsaStep([1], [ratio * n], compression) for n in (2, 3, 4)]
    built = [step.build() for step in steps]
    found = [metadata.compressed.compressor.key_positions for metadata in built]
    assert [int(positions[0]) for positions in found] == [ratio, ratio * 2, ratio * 3]
    rows = [steps[0].rotary(positions)[0] for positions in found]
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[1], rows[2])


@pytest.mark.parametrize("kind", COMPRESSING)
def test_case_15_a_prompt_of_k_and_one_tokens(kind: str) -> None:
    """Beside a long prompt, with k = 8 drafts configured: nine tokens from position 0."""
    step = DsaStep([9, 30], [9, 30], KINDS[kind], num_spec_tokens=8)
    plain = DsaStep([9, 30], [9, 30], KINDS[kind])
    chosen, output = step.run()
    other, expected = plain.run()
    assert chosen is None if other is None else torch.equal(chosen, other)
    torch.testing.assert_close(output, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", [*KINDS])
def test_case_22_idle_runs_write_nothing(kind: str) -> None:
    """A real step, then an idle run of four requests that each finish two groups."""
    step = DsaStep([5, 1], [40, 33], KINDS[kind], num_spec_tokens=3)
    step.run()
    pairs = [*step.caches.values(), *(state for pair in step.states.values() for state in pair)]
    before = [cache.clone() for cache in pairs]
    idle = DsaStep([16] * 4, [16] * 4, KINDS[kind])
    idle.caches, idle.states = step.caches, step.states
    tables = None if idle.compression is None else DsaTables.cleared(4, 3, 3)
    metadata = idle.builder().build(AttentionBatch.dummy(4, 16, 3), tables)
    idle.write(metadata, 64)
    for cache, expected in zip(pairs, before, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("kind", COMPRESSING)
def test_case_22_control_slots_of_the_tokens_decide(kind: str) -> None:
    """The same idle run with slots writes, so that the comparison above can fail."""
    idle = DsaStep([16] * 4, [16] * 4, KINDS[kind])
    before = idle.caches["compressed"].clone()
    batch = AttentionBatch.dummy(4, 16, 3)
    batch = attrs.evolve(batch, slot_mapping=torch.arange(64) % 32)
    idle.write(idle.builder().build(batch, DsaTables.cleared(4, 3, 3)), 64)
    assert not torch.equal(idle.caches["compressed"].nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("kind", [*KINDS])
def test_case_33_output_is_written_in_place(kind: str) -> None:
    step = DsaStep([3], [20], KINDS[kind])
    chosen, _ = step.run()
    output = torch.zeros(3, 4, 32)
    address = output.data_ptr()
    found = step.impl().forward(
        step.query, step.caches["window"], step.build(), output, **step.keys(chosen)
    )
    assert found is output
    assert output.data_ptr() == address
    assert output.any(-1).all()


def test_case_39_addresses_beyond_32_bits() -> None:
    """Block 131,073 of 32 compressed keys of 512 elements starts beyond 2**31 - 1.

    The pool is virtual memory: only the pages that are written exist.
    """
    block, size = 131_073, 32
    assert block * size * 512 > 2**31 - 1
    pool = torch.empty(block + 1, 1, size, 512, dtype=torch.bfloat16)
    compression = DsaCompression(4)
    builder = AscendDSAMetadataBuilder(
        16, num_heads=2, compression=compression, compressed_block_size=size, state_block_size=16
    )
    tables = DsaTables(
        compressed=torch.tensor([[block]], dtype=torch.int32),
        state=torch.tensor([[1]], dtype=torch.int32),
    )
    metadata = builder.build(AttentionBatch.from_lengths([8], [8], 16), tables)
    assert metadata.compressed.compressor.key_slots[:2].tolist() == [block * size, block * size + 1]
    weights = CompressorWeights(
        *(torch.randn(512, 8).bfloat16() for _ in range(2)),
        torch.zeros(4, 512),
        torch.ones(512).bfloat16(),
    )
    compressor = AscendDSACompressor(compression, weights)
    states = tuple(torch.zeros(2, 16, 512) for _ in range(2))
    cos, sin = torch.ones(3, 64).bfloat16(), torch.zeros(3, 64).bfloat16()
    keys = compressor.forward(torch.randn(8, 8).bfloat16(), states, (cos, sin), metadata)
    compressor.write_kv(keys, pool, metadata)
    assert torch.equal(pool[block, 0, :2], keys[:2])
    window = torch.zeros(1, 1, 16, 512, dtype=torch.bfloat16)
    query = (keys[1] * 100).expand(8, 2, 512)
    output = AscendDSAImpl(2, 1.0, compression).forward(
        query, window, metadata, torch.empty_like(query), pool
    )
    assert torch.equal(output[7], keys[1].expand(2, 512))


class TestCase40:
    """A row of 2 blocks of compressed keys, and a request with keys for 3."""

    def step(self) -> DsaStep:
        step = DsaStep([1, 1], [140, 60], SPARSE)
        step.run()
        narrow = step.tables.compressed[:, :2]
        step.tables = attrs.evolve(step.tables, compressed=narrow.contiguous())
        return step

    def test_case_40_host_lengths_give_an_error(self) -> None:
        with pytest.raises(AttentionBatchError, match=r"compressed: found 2 columns; .* least 3"):
            self.step().build()

    def test_case_40_device_lengths_never_reach_the_next_row(self) -> None:
        step = self.step()
        metadata = step.builder().build(attrs.evolve(step.batch(), seq_lens_cpu=None), step.tables)
        assert metadata.compressed.key_lens.tolist() == [32, 15]
        assert metadata.seq_lens.tolist() == [32 * 4 + 3, 60]
        assert int(metadata.compressed.compressor.key_slots[0]) // 16 in step.tables.compressed[1]
        assert int(metadata.compressed.index.step.seq_lens.max()) <= 32
        other = step.tables.compressed[1].long()
        step.caches["compressed"][other] = step.caches["index"][other] = torch.nan
        keys = step.keys(step.choose(metadata, 2))
        output = torch.empty(2, 4, 32)
        step.impl().forward(step.query, step.caches["window"], metadata, output, **keys)
        assert output[0].isfinite().all()


@pytest.mark.parametrize("compression", [SPARSE, HEAVY])
def test_case_64_dirty_starts_are_repaired_on_the_device(compression: DsaCompression) -> None:
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
    builder = AscendDSAMetadataBuilder(
        16, num_heads=4, compression=compression, head_size=32, compressed_block_size=16
    )
    with sanitize(False):  # while debugging such a batch is an error
        metadata = builder.build(batch, DsaTables.cleared(4, 1, 1))
    assert metadata.query_starts.tolist() == [0, 3, 3, 3, 7]
    assert metadata.seq_lens.tolist() == [3, 9, 0, 4]
    assert metadata.compressed.compressor.first_positions.tolist() == [0, 9, 0, 0]
    if compression.overlap:
        index = metadata.compressed.index
        assert sorted(index.order.tolist()) == list(range(7))
        assert index.step.query_ends.tolist()[-1] == 7
