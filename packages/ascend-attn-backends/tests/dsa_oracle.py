"""DeepSeek-V4 attention in float64 from the definition, and steps over our caches to compare."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from attn_backends_support import padded

from ascend_attn_backends import (
    AscendDSACompressor,
    AscendDSAImpl,
    AscendDSAIndexerImpl,
    AscendDSAMetadata,
    AscendDSAMetadataBuilder,
    AttentionBatch,
    CompressorWeights,
    DsaCacheShape,
    DsaCompression,
    DsaTables,
)

SPARSE, HEAVY = DsaCompression(4, top_k=3), DsaCompression(8)
KINDS = {"window": None, "sparse": SPARSE, "heavy": HEAVY}


@attrs.define(eq=False, slots=False)
class DsaStep:
    """Requests with their whole history; what no request has written is NaN.

    The step's earlier tokens are written by an earlier step of the same layer.
    """

    query_lens: list[int]
    seq_lens: list[int]
    compression: DsaCompression | None = SPARSE
    block_size: int = 16
    heads: int = 4
    size: int = 32
    index_size: int = 32
    index_heads: int = 16
    hidden_size: int = 24
    rope: int = 8
    window: int = 9
    dtype: torch.dtype = torch.float32
    num_spec_tokens: int = 0
    with_sinks: bool = True
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        tokens = sum(self.query_lens)
        self.hidden = [self.normal(n, self.hidden_size) for n in self.seq_lens]
        self.kv = [self.normal(n, self.size) for n in self.seq_lens]
        self.query = self.normal(tokens, self.heads, self.size)
        self.index_query = self.normal(tokens, self.index_heads, self.index_size)
        self.index_weights = self.normal(tokens, self.index_heads)
        self.sinks = self.normal(self.heads).float() if self.with_sinks else None
        self.scale = self.size**-0.5
        self.weights = {"compressed": self._weights(self.size)}
        self.weights["index"] = self._weights(self.index_size)
        self._make_caches()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random, dtype=torch.float64).to(self.dtype)

    def _weights(self, size: int) -> CompressorWeights | None:
        if self.compression is None:
            return None
        width = self.compression.coff * size
        scale = self.hidden_size**-0.5
        return CompressorWeights(
            self.normal(width, self.hidden_size) * scale,
            self.normal(width, self.hidden_size) * scale,
            self.normal(self.compression.ratio, width).float(),
            self.normal(size),
        )

    def _make_caches(self) -> None:
        """Blocks in random order."""
        ratio = 1 if self.compression is None else self.compression.ratio
        longest = max([1, *self.seq_lens])
        self.table = self._table(self.block_size, longest)
        self.tables = None
        if self.compression is not None:
            compressed = self._table(self.block_size * ratio, longest)
            self.tables = DsaTables(compressed=compressed, state=self._table(16, longest) + 1)
        blocks = self.table.numel() + 2 + (0 if self.tables is None else self.tables.state.numel())
        shape = DsaCacheShape.of_layer(
            blocks,
            self.block_size,
            self.compression,
            state_block_size=16,
            key_size=self.size,
            index_size=self.index_size,
        )
        paged = {"window": shape.window, "compressed": shape.compressed, "index": shape.index}
        self.caches = {
            name: cache.allocate(self.dtype).fill_(math.nan)
            for name, cache in paged.items()
            if cache
        }
        states = {"compressed": shape.state, "index": shape.index_state}
        self.states = {name: state.allocate() for name, state in states.items() if state}
        for pair in self.states.values():
            for state in pair:
                state.fill_(math.nan)

    def _table(self, tokens: int, longest: int) -> torch.Tensor:
        width = -(-longest // tokens)
        order = torch.randperm(len(self.seq_lens) * width, generator=self._random)
        return order.view(len(self.seq_lens), width).int()

    def batch(self) -> AttentionBatch:
        return AttentionBatch.from_lengths(
            self.query_lens, self.seq_lens, self.block_size, block_table=self.table
        )

    def builder(self) -> AscendDSAMetadataBuilder:
        return AscendDSAMetadataBuilder(
            self.block_size,
            num_heads=self.heads,
            compression=self.compression,
            window=self.window,
            head_size=self.size,
            compressed_block_size=self.block_size,
            state_block_size=16,
            num_spec_tokens=self.num_spec_tokens,
        )

    def build(self, batch: AttentionBatch | None = None) -> AscendDSAMetadata:
        return self.builder().build(batch or self.batch(), self.tables)

    def impl(self) -> AscendDSAImpl:
        return AscendDSAImpl(self.heads, self.scale, self.compression, self.sinks, self.size)

    def new_rows(self, history: list[torch.Tensor], rows: int) -> torch.Tensor:
        """Rows of this step's tokens, padded."""
        parts = [x[len(x) - n :] for x, n in zip(history, self.query_lens, strict=True)]
        if not parts:
            return torch.zeros(rows, self.size, dtype=self.dtype)
        return padded(torch.cat(parts), rows)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each angle twice in a row."""
        steps = 7.0 ** torch.arange(self.rope // 2, device=positions.device)
        angles = (positions[:, None] / steps).repeat_interleave(2, -1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def compressor(self, name: str) -> AscendDSACompressor:
        weights, size = self.weights[name], {"compressed": self.size, "index": self.index_size}
        assert self.compression is not None
        assert weights is not None
        return AscendDSACompressor(self.compression, weights, size[name], self.rope)

    def write(self, metadata: AscendDSAMetadata, rows: int) -> None:
        """Write the keys of this step's tokens into every cache."""
        self.impl().write_kv(
            self.new_rows(self.kv, rows), self.caches["window"], metadata.slot_mapping
        )
        if metadata.compressed is None:
            return
        rotary = self.rotary(metadata.compressed.compressor.key_positions)
        for name in self.states:
            compressor, hidden = self.compressor(name), self.new_rows(self.hidden, rows)
            keys = compressor.forward(hidden, self.states[name], rotary, metadata)
            compressor.write_kv(keys, self.caches[name], metadata)

    def before(self) -> None:
        """Write the tokens before this step."""
        earlier = attrs.evolve(self)
        earlier.query_lens = [n - q for n, q in zip(self.seq_lens, self.query_lens, strict=True)]
        earlier.seq_lens = earlier.query_lens
        for name in ("hidden", "kv"):
            parts = zip(getattr(self, name), earlier.seq_lens, strict=True)
            setattr(earlier, name, [rows[:n] for rows, n in parts])
        for name in ("table", "tables", "caches", "states", "weights"):
            setattr(earlier, name, getattr(self, name))
        if any(earlier.query_lens):
            earlier.write(earlier.build(), sum(earlier.query_lens))

    def choose(self, metadata: AscendDSAMetadata, rows: int) -> torch.Tensor | None:
        if self.compression is None or self.compression.top_k is None:
            return None
        indexer = AscendDSAIndexerImpl(self.index_heads, self.compression, self.index_size)
        return indexer.forward(
            padded(self.index_query, rows),
            padded(self.index_weights, rows),
            self.caches["index"],
            metadata,
        )

    def keys(self, chosen: torch.Tensor | None) -> dict[str, Any]:
        """What the layer attends to besides the window."""
        return {"compressed_cache": self.caches.get("compressed"), "topk_indices": chosen}

    def run(self, batch: AttentionBatch | None = None) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(choice, output) of every token row, padding included."""
        batch = batch or self.batch()
        rows, metadata = batch.num_token_rows, self.build(batch)
        self.before()
        self.write(metadata, rows)
        chosen = self.choose(metadata, rows)
        query = padded(self.query, rows)
        output = torch.full_like(query, math.nan)
        window = self.caches["window"]
        assert self.impl().forward(query, window, metadata, output, **self.keys(chosen)) is output
        return chosen, output

    def tokens(self) -> list[tuple[int, int]]:
        """(request, position) of every token."""
        return [
            (row, length - count + i)
            for row, (count, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True))
            for i in range(count)
        ]

    def made(self, name: str, row: int) -> torch.Tensor:
        """``[groups, D]`` float64 keys of a request, group by group from its hidden states."""
        weights, compression = self.weights[name], self.compression
        assert compression is not None
        assert weights is not None
        x, ratio = self.hidden[row].double(), compression.ratio
        values, gates = x @ weights.kv.double().T, x @ weights.gate.double().T
        size = len(weights.norm)
        own = slice(size * (compression.coff - 1), None)
        keys = [torch.zeros(0, size, dtype=torch.float64)]
        for group in range(len(x) // ratio):
            parts = [(range(group * ratio, group * ratio + ratio), own)]
            if compression.overlap and group:
                parts.append((range(group * ratio - ratio, group * ratio), slice(0, size)))
            rows = [(token, channels) for span, channels in parts for token in span]
            value = torch.stack([values[token, channels] for token, channels in rows])
            gate = torch.stack(
                [
                    gates[token, channels] + weights.position_bias[token % ratio, channels].double()
                    for token, channels in rows
                ]
            )
            power = (gate - gate.amax(0)).exp()
            key = (power * value).sum(0) / power.sum(0)
            key = key / (key.square().mean() + 1e-6).sqrt() * weights.norm.double()
            keys.append(self._turned(key, group * ratio)[None])
        return torch.cat(keys)

    def _turned(self, key: torch.Tensor, position: int) -> torch.Tensor:
        """The last channels as complex numbers times e^(i angle)."""
        pairs = torch.view_as_complex(key[-self.rope :].view(-1, 2).contiguous())
        cos, sin = (part[0, ::2].double() for part in self.rotary(torch.tensor([position])))
        return torch.cat(
            [key[: -self.rope], torch.view_as_real(pairs * (cos + 1j * sin)).flatten()]
        )

    def scores(self, token: int) -> torch.Tensor:
        """float64 index scores of the compressed keys that a token sees."""
        row, position = self.tokens()[token]
        assert self.compression is not None
        keys = self.made("index", row)[: (position + 1) // self.compression.ratio]
        total = torch.zeros(len(keys), dtype=torch.float64)
        for head in range(self.index_heads):
            product = keys @ self.index_query[token, head].double()
            total += self.index_weights[token, head].double() * product.clamp(min=0)
        return total

    def best(self, token: int) -> list[int]:
        """Numbers of the compressed keys that a token attends to."""
        _, position = self.tokens()[token]
        if self.compression is None:
            return []
        if self.compression.top_k is None:
            return list(range((position + 1) // self.compression.ratio))
        return self.scores(token).argsort(descending=True)[: self.compression.top_k].tolist()

    def attention(
        self, token: int, numbers: list[int], *, cached: bool = False, sinks: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 output [N, D] and lse without sinks [N] over the window and some compressed keys.

        ``cached`` takes the compressed keys from the cache, with its rounding.
        """
        row, position = self.tokens()[token]
        first = max(position - self.window + 1, 0)
        keys = [self.kv[row][first : position + 1].double()]
        if numbers:
            keys.append(
                self.cached(row)[numbers] if cached else self.made("compressed", row)[numbers]
            )
        rows = torch.cat(keys)
        scores = self.query[token].double() @ rows.T * self.scale
        total = scores.exp().sum(-1)
        sink = self.sinks.double().exp() if sinks and self.sinks is not None else 0.0
        return scores.exp() @ rows / (total + sink)[:, None], total.log()

    def cached(self, row: int) -> torch.Tensor:
        """``[keys, D]`` compressed keys of a request as the cache has them."""
        assert self.tables is not None
        cache = self.caches["compressed"][self.tables.compressed[row].long(), 0]
        return cache.flatten(0, 1).double()
