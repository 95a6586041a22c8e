"""One step of the compressed backend from random rows, on one rank and on several.

The caches are filled by a step before it, since compressed keys come from states. What the plain
backend gives is checked against Hugging Face's module elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from cp_support import BLOCK, DRAFTS, Layout, Ranks, own_heads

from ascend_attn_backends import (
    AscendDSACompressor,
    AscendDSADCPImpl,
    AscendDSADCPMetadataBuilder,
    AscendDSAImpl,
    AscendDSAIndexerDCPImpl,
    AscendDSAIndexerImpl,
    AscendDSAMetadataBuilder,
    AttentionBatch,
    CompressorWeights,
    DsaCacheShape,
    DsaCompression,
    DsaTables,
)

HIDDEN, HEADS, KEY, INDEX, INDEX_HEADS, ROPE, WINDOW = 24, 4, 32, 32, 16, 16, 11
KINDS = {
    "window": None,
    "chosen": DsaCompression(4, top_k=3),
    "all": DsaCompression(8),
}


@attrs.define(eq=False, slots=False)
class CompressedStep:
    """Requests with their whole history of hidden states, keys and queries of one layer."""

    query_lens: list[int]
    seq_lens: list[int]
    kind: str
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.compression = KINDS[self.kind]
        sizes = {"hidden": (HIDDEN,), "kv": (KEY,), "query": (HEADS, KEY)}
        sizes |= {"index_query": (INDEX_HEADS, INDEX), "weights": (INDEX_HEADS,)}
        self.rows = {
            name: [torch.randn(length, *size, generator=g) for length in self.seq_lens]
            for name, size in sizes.items()
        }
        self.sinks = torch.randn(HEADS, generator=g)
        self.compressors = self._compressors(g) if self.compression is not None else {}
        requests, longest = len(self.seq_lens), max(self.seq_lens)
        width = -(-longest // BLOCK)
        self.table = torch.randperm(requests * width, generator=g).view(requests, width).int()
        self.num_blocks = requests * width + 1
        self.tables = DsaTables(compressed=self.table.clone(), state=self.table + 1)

    def _compressors(self, g: torch.Generator) -> dict[str, AscendDSACompressor]:
        compression, found = self.compression, {}
        assert compression is not None
        sizes = {"compressed": KEY, "index": INDEX} if compression.overlap else {"compressed": KEY}
        for name, size in sizes.items():
            width = compression.coff * size
            weights = CompressorWeights(
                torch.randn(width, HIDDEN, generator=g) * HIDDEN**-0.5,
                torch.randn(width, HIDDEN, generator=g) * HIDDEN**-0.5,
                torch.randn(compression.ratio, width, generator=g),
                torch.ones(size),
            )
            found[name] = AscendDSACompressor(compression, weights, size, ROPE)
        return found

    def new_rows(self, name: str, lens: list[int], ends: list[int]) -> torch.Tensor:
        """Rows of the last ``lens`` tokens before ``ends`` of each request."""
        spans = zip(self.rows[name], lens, ends, strict=True)
        return torch.cat([rows[end - count : end] for rows, count, end in spans])

    def steps(self) -> list[tuple[list[int], list[int]]]:
        """(query_lens, seq_lens) of the step before and of the step itself."""
        done = [n - q for n, q in zip(self.seq_lens, self.query_lens, strict=True)]
        return [(done, done), (self.query_lens, self.seq_lens)]

    def builder_options(self) -> dict[str, Any]:
        return {
            "compression": self.compression,
            "window": WINDOW,
            "head_size": KEY,
            "compressed_block_size": BLOCK,
            "state_block_size": BLOCK,
            "num_spec_tokens": DRAFTS,
        }

    def memory(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(caches, states) of a rank, unwritten rows NaN."""
        shape = DsaCacheShape.of_layer(
            self.num_blocks, BLOCK, self.compression, key_size=KEY, index_size=INDEX
        )
        paged = {"window": shape.window, "compressed": shape.compressed, "index": shape.index}
        states = {"compressed": shape.state, "index": shape.index_state}
        return (
            {
                name: kind.allocate(torch.float32).fill_(math.nan)
                for name, kind in paged.items()
                if kind is not None
            },
            {name: kind.allocate() for name, kind in states.items() if kind is not None},
        )

    def plain(self) -> torch.Tensor:
        """Output [T, N, KEY] of the backend for one rank."""
        builder = AscendDSAMetadataBuilder(BLOCK, num_heads=HEADS, **self.builder_options())
        impl = AscendDSAImpl(HEADS, KEY**-0.5, self.compression, self.sinks, KEY)
        indexer = None
        if self.kind == "chosen":
            indexer = AscendDSAIndexerImpl(INDEX_HEADS, KINDS["chosen"], INDEX)
        return self._run([builder, builder], impl, indexer, slice(None))

    def on_rank(self, layout: Layout, ranks: Ranks) -> torch.Tensor:
        """Output [T, N / size, KEY] of one rank."""
        builder = AscendDSADCPMetadataBuilder(
            BLOCK,
            num_heads=HEADS // layout.heads,
            **self.builder_options(),
            shard=layout.shard(ranks.rank),
        )
        builders = [builder, attrs.evolve(builder, shard=layout.read_shard(ranks.rank))]
        heads = own_heads(HEADS, layout, ranks.rank)
        impl = AscendDSADCPImpl(
            HEADS // layout.heads,
            KEY**-0.5,
            self.compression,
            self.sinks[heads],
            ranks.heads,
            KEY,
        )
        indexer = None
        if self.kind == "chosen":
            indexer = AscendDSAIndexerDCPImpl(INDEX_HEADS, KINDS["chosen"], ranks.heads, INDEX)
        return self._run(builders, impl, indexer, heads)

    def _run(self, builders: list[Any], impl: Any, indexer: Any, heads: slice) -> torch.Tensor:
        """Output of the last step; each step has its builder."""
        caches, states = self.memory()
        for builder, (lens, ends) in zip(builders, self.steps(), strict=True):
            batch = AttentionBatch.from_lengths(lens, ends, BLOCK, block_table=self.table)
            metadata = builder.build(batch, None if self.compression is None else self.tables)
            kv = self.new_rows("kv", lens, ends)
            impl.write_kv(kv, caches["window"], metadata.slot_mapping)
            compressing = getattr(metadata, "for_compressor", metadata)
            self._compress(self.new_rows("hidden", lens, ends), caches, states, compressing)
            chosen = None
            if indexer is not None:
                index = [self.new_rows(name, lens, ends) for name in ("index_query", "weights")]
                chosen = indexer.forward(*index, caches["index"], metadata)
            query = self.new_rows("query", lens, ends)[:, heads]
            output = torch.full_like(query, math.nan)
            compressed = caches.get("compressed")
            impl.forward(query, caches["window"], metadata, output, compressed, chosen)
        return output

    def _compress(
        self,
        hidden: torch.Tensor,
        caches: dict[str, torch.Tensor],
        states: dict[str, Any],
        metadata: Any,
    ) -> None:
        if metadata.compressed is None:
            return
        positions = metadata.compressed.compressor.key_positions
        angles = positions[:, None] * (0.1 ** torch.arange(ROPE // 2)).repeat_interleave(2)
        rotary = (angles.cos(), angles.sin())
        for name, compressor in self.compressors.items():
            keys = compressor.forward(hidden, states[name], rotary, metadata)
            compressor.write_kv(keys, caches[name], metadata)
