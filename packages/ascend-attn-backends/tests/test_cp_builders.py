"""Builders of backends over shared keys: what they read, the slots they make, what they refuse."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from cp_support import BLOCK, Layout, batches
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    AscendAttentionDCPImpl,
    AscendAttentionDCPMetadataBuilder,
    AscendDSADCPMetadataBuilder,
    AscendMLAMetadataBuilder,
    AscendSFADCPImpl,
    AscendSFADCPMetadataBuilder,
    AscendSFAIndexerDCPImpl,
    AscendSFAIndexerDCPMetadataBuilder,
    AscendSFAIndexerMetadataBuilder,
    AttentionBatch,
    AttentionBatchError,
    ContextShard,
    DsaCompression,
    DsaTables,
    InvalidFieldError,
    local_choice,
    per_token_batch,
    run_ranks,
    sharded_batch,
)
from ascend_attn_ops import sanitize

FOUR = Layout(heads=4)


def test_debugging_takes_tokens_without_keys_of_a_shard() -> None:
    """While debugging, builders validate batches: a shard may have fewer keys than tokens."""
    (_, batch) = batches([1, 2], [1, 5], 2)
    tokens = per_token_batch(batch, ContextShard(rank=1, size=2))
    assert tokens.seq_lens.tolist() == [0, 2, 2]
    with sanitize():
        assert AscendMLAMetadataBuilder(BLOCK).build(tokens).keyless_tokens is not None
        whole = attrs.evolve(tokens, has_shard_lengths=False)
        with pytest.raises(AttentionBatchError, match=r"seq_lens\[0\]: found 0; allowed: at least"):
            AscendMLAMetadataBuilder(BLOCK).build(whole)


def test_debugging_finds_stale_rows() -> None:
    (batch, _) = batches([1, 2], [1, 5], 2)
    keys = torch.tensor([1, 1], dtype=torch.int32)
    stale = attrs.evolve(batch, seq_lens=keys, seq_lens_cpu=keys)
    for builder in (AscendSFADCPMetadataBuilder, AscendAttentionDCPMetadataBuilder):
        with sanitize(), pytest.raises(AttentionBatchError, match=r"seq_lens\[1\]: found 1"):
            builder(BLOCK, shard=ContextShard(size=2)).build(stale)


@pytest.mark.parametrize("causal", [True, False])
def test_sparse_builders_read_nothing_from_the_device(causal: bool) -> None:
    """On the meta device, where no value can be read, metadata is built."""
    shard = ContextShard(rank=1, size=2)
    host = sharded_batch([3, 1], [20, 9], BLOCK, shard, causal=causal)
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    tensors = {name: getattr(host, name).to("meta") for name in names}
    batch = attrs.evolve(host, **tensors, query_start_loc_cpu=None, seq_lens_cpu=None)
    for builder in (AscendSFADCPMetadataBuilder, AscendSFAIndexerDCPMetadataBuilder):
        metadata = builder(BLOCK, shard=shard).build(batch)
        assert metadata.num_tokens == metadata.num_reqs == 4
        assert metadata.seq_lens.shape == (4,)
        assert metadata.dcp.exchanges


def test_compressed_builder_reads_nothing_from_the_device() -> None:
    host = AttentionBatch.from_lengths([3, 1], [40, 9], BLOCK)
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    tensors = {name: getattr(host, name).to("meta") for name in names}
    batch = attrs.evolve(host, **tensors, query_start_loc_cpu=None, seq_lens_cpu=None)
    table = torch.zeros(2, 3, dtype=torch.int32, device="meta")
    builder = AscendDSADCPMetadataBuilder(
        BLOCK, num_heads=2, compression=DsaCompression(8), shard=ContextShard(rank=1, size=2)
    )
    metadata = builder.build(batch, DsaTables(compressed=table, state=table))
    assert metadata.shared is not None
    assert metadata.shared.num_reqs == 4


def test_each_compressed_key_has_one_slot_on_one_rank() -> None:
    written = []
    for rank in range(4):
        builder = AscendDSADCPMetadataBuilder(
            BLOCK,
            num_heads=1,
            compression=DsaCompression(4),
            compressed_block_size=BLOCK,
            shard=FOUR.shard(rank),
        )
        batch = AttentionBatch.from_lengths([90, 5], [90, 43], BLOCK)
        tables = DsaTables(
            compressed=torch.tensor([[3], [5]], dtype=torch.int32),
            state=torch.ones(2, 1, dtype=torch.int32),
        )
        compressor = builder.build(batch, tables).for_compressor.compressed.compressor
        slots = compressor.key_slots
        numbers = compressor.key_positions // 4
        own = slots >= 0
        blocks = torch.where(torch.arange(len(slots)) < 22, 3, 5)
        assert torch.equal(slots[own], (blocks * BLOCK + numbers // 4)[own])
        assert (numbers[own] % 4 == rank).all()
        written.append(own)
    made = torch.stack(written).sum(0)
    assert made.tolist() == [1] * 23 + [0] * (len(made) - 23)  # 22 of the prompt, one at 40


@given(
    st.lists(st.integers(-1, 99), min_size=1, max_size=9, unique=True),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_choices_are_split_among_the_owners(chosen: list[int], size: int, interleave: int) -> None:
    found = []
    for rank in range(size):
        shard = ContextShard(rank=rank, size=size, interleave=interleave)
        places = local_choice(torch.tensor([chosen], dtype=torch.int32), shard)[0]
        own = places[places >= 0]
        assert places.tolist() == [*own.tolist(), *[-1] * (len(chosen) - len(own))]
        assert own.tolist() == sorted(own.tolist())
        found += shard.global_positions(own).tolist()
    assert sorted(found) == sorted(position for position in chosen if position >= 0)


class TestRefusals:
    def test_a_block_row_that_is_too_narrow_for_the_rank(self) -> None:
        (batch, _) = batches([1], [70], 2)
        narrow = attrs.evolve(batch, block_table=batch.block_table[:, :2])
        for builder in (AscendAttentionDCPMetadataBuilder, AscendSFADCPMetadataBuilder):
            with pytest.raises(AttentionBatchError, match="2 columns; allowed: at least 3, for 35"):
                builder(BLOCK, shard=ContextShard(size=2)).build(narrow)

    def test_compressed_keys_that_do_not_fit_into_their_row(self) -> None:
        batch = AttentionBatch.from_lengths([1], [8 * 40], BLOCK)
        table = torch.ones(1, 1, dtype=torch.int32)
        tables = DsaTables(compressed=table, state=torch.ones(1, 3, dtype=torch.int32))
        builder = AscendDSADCPMetadataBuilder(
            BLOCK,
            num_heads=1,
            compression=DsaCompression(8),
            compressed_block_size=BLOCK,
            shard=ContextShard(size=2),
        )
        with pytest.raises(AttentionBatchError, match="1 columns; allowed: at least 2, for 20 key"):
            builder.build(batch, tables)

    @pytest.mark.parametrize("given", [True, False])
    def test_tables_that_do_not_belong_to_the_layer(self, given: bool) -> None:
        table = torch.ones(1, 3, dtype=torch.int32)
        tables = DsaTables(compressed=table, state=table) if given else None
        compression = None if given else DsaCompression(8)
        builder = AscendDSADCPMetadataBuilder(BLOCK, num_heads=1, compression=compression)
        with pytest.raises(InvalidFieldError, match="tables"):
            builder.build(AttentionBatch.from_lengths([1], [5], BLOCK), tables)

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "size", "message"),
        [
            (3, 2, 3, "num_heads: found 9; allowed: a multiple of 2"),
            (4, 2, 3, "num_heads: found 4; allowed: a divisor or a multiple of 6"),
        ],
    )
    def test_heads_that_do_not_divide(
        self, heads: int, kv_heads: int, size: int, message: str
    ) -> None:
        def body(group: Any) -> None:
            with pytest.raises(InvalidFieldError, match=message):
                AscendAttentionDCPImpl(heads, 16, 0.25, kv_heads, group)

        run_ranks(size, body)

    def test_metadata_of_another_rank(self) -> None:
        def body(group: Any) -> None:
            other = Layout(heads=2).shard(1 - group.rank)
            batch = sharded_batch([1], [5], BLOCK, other)
            metadata = AscendSFADCPMetadataBuilder(BLOCK, shard=other).build(batch)
            rows = torch.zeros(1, 2, 512), torch.zeros(1, 2, 64)
            caches = torch.zeros(1, 1, BLOCK, 512), torch.zeros(1, 1, BLOCK, 64)
            chosen = torch.zeros(1, 1, 3, dtype=torch.int32)
            message = f"rank {other.rank} of 2; allowed: rank {group.rank} of 2"
            with pytest.raises(InvalidFieldError, match=message):
                AscendSFADCPImpl(2, 0.1, group).forward(
                    *rows, *caches, chosen, metadata, torch.zeros(1, 2, 512)
                )

        run_ranks(2, body)

    def test_metadata_for_one_rank(self) -> None:
        metadata = AscendSFAIndexerMetadataBuilder(BLOCK).build(
            AttentionBatch.from_lengths([1], [5], BLOCK)
        )
        with pytest.raises(InvalidFieldError, match="AscendSFAIndexerMetadata; allowed: that of a"):
            AscendSFAIndexerDCPImpl(16).forward(
                torch.zeros(1, 16, 128),
                torch.zeros(1, 16),
                torch.zeros(1, 1, BLOCK, 128),
                metadata,
            )

    def test_a_choice_of_another_dtype(self) -> None:
        with pytest.raises(InvalidFieldError, match=r"found torch.int64; allowed: torch.int32"):
            local_choice(torch.zeros(1, 1, 2, dtype=torch.int64), ContextShard())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"size": 0}, "size: found 0; allowed: at least 1"),
            ({"rank": 2}, "rank: found 2; allowed: 0 to 1"),
            ({"rank": -1}, "rank: found -1; allowed: 0 to 1"),
            ({"interleave": 0}, "interleave: found 0; allowed: at least 1"),
        ],
    )
    def test_impossible_shards(self, change: dict[str, int], message: str) -> None:
        with pytest.raises(InvalidFieldError, match=message):
            ContextShard(**{"rank": 0, "size": 2, **change})
