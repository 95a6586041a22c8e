"""Attention modules of Hugging Face, and the same weights around our backends on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import attrs
import dsa_hugging_face
import qwen3_hugging_face as qwen3
import torch
from attn_backends_support import UNWRITTEN
from cp_support import DRAFTS, Layout, Ranks, joined, on_ranks, own_heads
from latent_hugging_face import leave, projected
from latent_schedules import Chunk
from sparse_hugging_face import HEADS, NOPE, TOP_K, Family, Ours, run

from ascend_attn_backends import (
    AscendAttentionDCPBackend,
    AscendAttentionDCPImpl,
    AscendAttentionDCPMetadataBuilder,
    AscendDSADCPImpl,
    AscendDSADCPMetadataBuilder,
    AscendDSAIndexerDCPImpl,
    AscendMLABackend,
    AscendMlaPCPImpl,
    AscendMlaPCPMetadataBuilder,
    AscendSFABackend,
    AscendSFADCPImpl,
    AscendSFADCPMetadataBuilder,
    AscendSFAIndexerDCPImpl,
    AscendSFAIndexerDCPMetadataBuilder,
    AscendSFAIndexerPCPImpl,
    AscendSFAIndexerPCPMetadataBuilder,
    AscendSFAPCPImpl,
    AscendSFAPCPMetadataBuilder,
    AttentionBatch,
    DsaTables,
    KeyValueRankStep,
    LatentRankStep,
    rotate_index_rows,
    sharded_batch,
)


@attrs.define(eq=False, slots=False)
class OnRanks:
    """What the layers on several ranks have in common."""

    found: Family
    layout: Layout
    block_size: int = 16
    num_blocks: int = 32

    def rank_batch(self, batch: AttentionBatch, rank: int) -> AttentionBatch:
        """A rank's batch; requests are prefills from their start, and with many tokens."""
        lens, ends = batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist()
        pairs = zip(lens, ends, strict=True)
        return sharded_batch(
            lens,
            ends,
            self.block_size,
            self.layout.shard(rank),
            block_table=batch.block_table,
            is_prefilling=[count == end or count > DRAFTS + 1 for count, end in pairs],
        )


@attrs.define(eq=False, slots=False)
class Qwen3OnRanks(OnRanks):
    """Grouped-query attention whose keys ranks share."""

    def __attrs_post_init__(self) -> None:
        shape = AscendAttentionDCPBackend.cache_shape(
            self.num_blocks, self.block_size, qwen3.KV_HEADS, qwen3.SIZE
        )
        self.caches = [
            [shape.allocate(torch.float32).fill_(UNWRITTEN) for _ in range(2)]
            for _ in range(self.layout.size)
        ]
        self.whole = qwen3.PagedQwen3(self.found, AscendAttentionDCPBackend)

    @torch.no_grad()
    def step(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> list[torch.Tensor]:
        """Outputs of the layer for the tokens of one step."""
        (layer,) = self.found.layers
        query, key, value = self.whole.project(hidden, positions)

        def body(ranks: Ranks) -> torch.Tensor:
            impl = AscendAttentionDCPImpl(
                qwen3.HEADS // self.layout.heads,
                qwen3.SIZE,
                layer.scaling,
                qwen3.KV_HEADS,
                ranks.heads,
            )
            builder = AscendAttentionDCPMetadataBuilder(
                self.block_size, **self.layout.shares(ranks.rank)
            )
            metadata, caches = builder.build(self.rank_batch(batch, ranks.rank)), self.caches
            impl.write_kv(key, value, *caches[ranks.rank], metadata.slot_mapping)
            own = query[:, own_heads(qwen3.HEADS, self.layout, ranks.rank)]
            step = KeyValueRankStep(
                query=own,
                key=key,
                value=value,
                key_cache=caches[ranks.rank][0],
                value_cache=caches[ranks.rank][1],
                metadata=metadata,
            )
            return impl.forward(step, torch.full_like(own, torch.nan))

        return [layer.o_proj(joined(on_ranks(self.layout, body), self.layout).flatten(1))]


@attrs.define(eq=False, slots=False)
class LatentOnRanks(OnRanks):
    """Dense latent attention whose tokens are spread over ranks."""

    def __attrs_post_init__(self) -> None:
        shape = AscendMLABackend.cache_shape(self.num_blocks, self.block_size)
        self.caches = [
            [kind.allocate(torch.float32).fill_(UNWRITTEN) for kind in (shape.latent, shape.rope)]
            for _ in range(self.layout.size)
        ]

    @torch.no_grad()
    def step(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> list[torch.Tensor]:
        """Outputs of the layer for the tokens of one step, in the order of the step."""
        (layer,) = self.found.layers

        def body(ranks: Ranks) -> torch.Tensor:
            heads = HEADS // self.layout.heads
            impl = AscendMlaPCPImpl(heads, layer.scaling, ranks.tokens, ranks.heads)
            builder = AscendMlaPCPMetadataBuilder(self.block_size, **self.layout.shares(ranks.rank))
            metadata = builder.build(self.rank_batch(batch, ranks.rank))
            own = metadata.pcp.own_rows
            rows = projected(self.found, own(hidden), own(positions))
            columns = own_heads(HEADS, self.layout, ranks.rank)
            caches = self.caches[ranks.rank]
            impl.gather_and_write_kv(rows.latent, rows.rope, *caches, metadata)
            step = LatentRankStep(
                q_nope=rows.q_nope[:, columns],
                q_pe=rows.q_pe[:, columns],
                latent=rows.latent,
                rope=rows.rope,
                latent_cache=caches[0],
                rope_cache=caches[1],
                metadata=metadata,
            )
            output = impl.forward_mqa(step, torch.full_like(step.q_nope, torch.nan))
            return metadata.pcp.step_order(impl.gather_tokens((output,), metadata.pcp)[0])

        return [leave(layer, joined(on_ranks(self.layout, body), self.layout))]


@attrs.define(eq=False, slots=False)
class SparseOnRanks(OnRanks):
    """Sparse latent attention and its indexer, tokens spread where the layout says so."""

    def __attrs_post_init__(self) -> None:
        shape = AscendSFABackend.cache_shape(self.num_blocks, self.block_size)
        self.caches = [
            [
                [
                    kind.allocate(torch.float32).fill_(torch.nan)
                    for kind in (shape.latent, shape.rope, shape.index)
                    if kind is not None
                ]
                for _ in self.found.layers
            ]
            for _ in range(self.layout.size)
        ]
        self.whole = Ours(self.found, self.block_size, 1)  # for its projections

    @torch.no_grad()
    def step(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> list[torch.Tensor]:
        """Outputs of every layer for the tokens of one step, in the order of the step."""

        def body(ranks: Ranks) -> list[torch.Tensor]:
            return self.rank_outputs(ranks, hidden, positions, batch)

        found = on_ranks(self.layout, body)
        outputs = []
        for number, layer in enumerate(self.found.layers):
            latents = joined([results[number] for results in found], self.layout)
            values = torch.einsum(
                "tnl,nvl->tnv", latents, self.whole.up_projection(layer)[:, NOPE:]
            )
            outputs.append(layer.o_proj(values.flatten(1)))
        return outputs

    def rank_outputs(
        self, ranks: Ranks, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> list[torch.Tensor]:
        """One rank's heads of all tokens, per layer; later layers reuse the choice of the first."""
        shares, own_batch = self.layout.shares(ranks.rank), self.rank_batch(batch, ranks.rank)
        spread = self.layout.spreads_tokens
        builders = (
            (AscendSFAPCPMetadataBuilder, AscendSFAIndexerPCPMetadataBuilder)
            if spread
            else (AscendSFADCPMetadataBuilder, AscendSFAIndexerDCPMetadataBuilder)
        )
        metadata, index_metadata = (
            builder(self.block_size, **shares).build(own_batch) for builder in builders
        )
        if spread:
            hidden, positions = (metadata.pcp.own_rows(part) for part in (hidden, positions))
        rotary = tuple(part[0] for part in self.found.rotary(hidden[None], positions[None]))
        columns = own_heads(HEADS, self.layout, ranks.rank)
        outputs, chosen = [], None
        for number, layer in enumerate(self.found.layers):
            caches = self.caches[ranks.rank][number]
            residual = layer.q_a_layernorm(layer.q_a_proj(hidden))
            if layer.indexer is not None:
                inputs = (hidden, residual, rotary)
                chosen = self.choose(ranks, layer.indexer, inputs, caches[2], index_metadata)
            rows = self.whole.project(layer, hidden, residual, rotary)
            impl = self.layer(ranks, layer.scaling)
            self.write(impl, rows[2:], caches[:2], metadata)
            query, rope = rows[0][:, columns], rows[1][:, columns]
            output = torch.full_like(query, torch.nan)
            impl.forward(query, rope, *caches[:2], chosen, metadata, output)
            if spread:
                gathered = impl.gather_tokens((output,), metadata.pcp)[0]
                output = metadata.pcp.step_order(gathered)
            outputs.append(output)
        return outputs

    def layer(self, ranks: Ranks, scale: float) -> Any:
        heads = HEADS // self.layout.heads
        if self.layout.spreads_tokens:
            return AscendSFAPCPImpl(heads, scale, ranks.tokens, ranks.heads)
        return AscendSFADCPImpl(heads, scale, ranks.heads)

    def choose(
        self,
        ranks: Ranks,
        module: Any,
        inputs: tuple[Any, ...],
        cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        hidden, residual, rotary = inputs
        query = module.wq_b(residual).unflatten(-1, (16, 128))
        key = module.k_norm(module.wk(hidden))[:, None]
        query, key = (rotate_index_rows(r, *rotary, self.found.style) for r in (query, key))
        if self.layout.spreads_tokens:
            indexer = AscendSFAIndexerPCPImpl(16, TOP_K, ranks.tokens, ranks.heads)
            indexer.gather_and_write_kv(key[:, 0], cache, metadata)
        else:
            indexer = AscendSFAIndexerDCPImpl(16, TOP_K, ranks.heads)
            indexer.write_kv(key[:, 0], cache, metadata.slot_mapping)
        weights = indexer.scaled_weights(module.weights_proj(hidden))
        return indexer.forward(query, weights, cache, metadata)

    def write(
        self, impl: Any, rows: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], metadata: Any
    ) -> None:
        if self.layout.spreads_tokens:
            impl.gather_and_write_kv(*rows, *caches, metadata)
        else:
            impl.write_kv(*rows, *caches, metadata.slot_mapping)


@attrs.define(eq=False, slots=False)
class CompressedOnRanks(dsa_hugging_face.Layer):
    """DeepSeek-V4 attention whose compressed keys ranks share."""

    layout: Layout = attrs.field(factory=Layout)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        copies = range(self.layout.size)
        self.memories = [{n: c.clone() for n, c in self.memory.items()} for _ in copies]
        self.rank_states = [
            {n: tuple(part.clone() for part in pair) for n, pair in self.states.items()}
            for _ in copies
        ]

    @torch.no_grad()
    def step(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        tables: DsaTables | None,
    ) -> torch.Tensor:
        """Output for the tokens of one step."""
        cos, sin = self.model.rotary_rows(self.number, positions)
        module, rows, all_heads = self.module, len(hidden), dsa_hugging_face.HEADS
        turn = dsa_hugging_face.rotated
        residual = module.q_a_norm(module.q_a_proj(hidden))
        query = module.q_b_norm(
            module.q_b_proj(residual).view(rows, all_heads, dsa_hugging_face.KEY)
        )
        query = turn(query, cos, sin)
        kv = turn(module.kv_norm(module.kv_proj(hidden))[:, None], cos, sin)[:, 0]

        def body(ranks: Ranks) -> torch.Tensor:
            columns = own_heads(all_heads, self.layout, ranks.rank)
            metadata = self.rank_builder(ranks).build(batch, tables)
            memory = self.memories[ranks.rank]
            impl = AscendDSADCPImpl(
                all_heads // self.layout.heads,
                module.scaling,
                self.compression,
                module.sinks.detach()[columns],
                ranks.heads,
                dsa_hugging_face.KEY,
            )
            impl.write_kv(kv, memory["window"], metadata.slot_mapping)
            self.rank_compress(ranks, hidden, metadata.for_compressor)
            chosen = self.rank_choose(ranks, (hidden, residual, (cos, sin)), metadata)
            own = query[:, columns]
            output = torch.full_like(own, torch.nan)
            compressed = memory.get("compressed")
            return impl.forward(own, memory["window"], metadata, output, compressed, chosen)

        output = turn(joined(on_ranks(self.layout, body), self.layout), cos, -sin)
        grouped = output.reshape(1, rows, self.model.config.o_groups, -1)
        result: torch.Tensor = module.o_b_proj(module.o_a_proj(grouped).flatten(2))[0]
        return result

    def rank_builder(self, ranks: Ranks) -> AscendDSADCPMetadataBuilder:
        return AscendDSADCPMetadataBuilder(
            self.block_size,
            num_heads=dsa_hugging_face.HEADS // self.layout.heads,
            compression=self.compression,
            window=self.model.config.sliding_window,
            head_size=dsa_hugging_face.KEY,
            compressed_block_size=self.block_size,
            state_block_size=dsa_hugging_face.STATE_BLOCK,
            num_spec_tokens=self.num_spec_tokens,
            **self.layout.shares(ranks.rank),
        )

    def rank_compress(self, ranks: Ranks, hidden: torch.Tensor, metadata: Any) -> None:
        if metadata.compressed is None:
            return
        positions = metadata.compressed.compressor.key_positions
        rotary = tuple(
            part.repeat_interleave(2, -1) for part in self.model.rotary_rows(self.number, positions)
        )
        modules = {"compressed": ("state", self.module.compressor)}
        if self.compression.overlap:
            modules["index"] = ("index_state", self.module.compressor.indexer)
        for name, (state, module) in modules.items():
            compressor = dsa_hugging_face.compressor_of(module, self.compression)
            states = self.rank_states[ranks.rank][state]
            keys = compressor.forward(hidden, states, rotary, metadata)
            compressor.write_kv(keys, self.memories[ranks.rank][name], metadata)

    def rank_choose(
        self, ranks: Ranks, inputs: tuple[Any, ...], metadata: Any
    ) -> torch.Tensor | None:
        if self.compression is None or not self.compression.overlap:
            return None
        hidden, residual, rotary = inputs
        theirs, heads = self.module.compressor.indexer, dsa_hugging_face.INDEX_HEADS
        size = dsa_hugging_face.INDEX
        indexer = AscendDSAIndexerDCPImpl(heads, self.compression, ranks.heads, size)
        query = theirs.q_b_proj(residual).view(len(hidden), heads, size)
        weights = indexer.scaled_weights(theirs.scorer.weights_proj(hidden))
        cache = self.memories[ranks.rank]["index"]
        query = dsa_hugging_face.rotated(query, *rotary)
        return indexer.forward(query, weights, cache, metadata)


def run_compressed(
    model: dsa_hugging_face.Model, layout: Layout, schedule: Sequence[Sequence[Chunk]], seed: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(ours, theirs) of every kind of layer, ours on ranks."""

    with mock.patch.object(dsa_hugging_face, "Layer", CompressedOnRanks):
        return dsa_hugging_face.run(model, schedule, seed, layout=layout)


__all__ = ["LatentOnRanks", "Qwen3OnRanks", "SparseOnRanks", "run", "run_compressed"]
