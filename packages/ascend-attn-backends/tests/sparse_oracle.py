"""A float64 oracle of selection and sparse attention, written apart from the code it checks."""

from __future__ import annotations

import math

import attrs
import torch

from ascend_attn_backends import (
    AscendSFAImpl,
    AscendSFAIndexerImpl,
    AscendSFAIndexerMetadataBuilder,
    AscendSFAMetadata,
    AscendSFAMetadataBuilder,
    AttentionBatch,
)

ROWS = {"latent": 512, "rope": 64, "index": 128}


@attrs.define(eq=False, slots=False)
class SparseStep:
    """Requests with their whole history, and paged caches that hold it.

    What no request owns is NaN, so that any read of it shows.
    """

    query_lens: list[int]
    seq_lens: list[int]
    block_size: int = 16
    heads: int = 4
    index_heads: int = 16
    top_k: int = 8
    causal: bool = True
    dtype: torch.dtype = torch.float32
    kernel_block_size: int | None = None
    one_tensor: bool = False
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(self.dtype)

        tokens = sum(self.query_lens)
        self.scale = 576**-0.5
        self.query = random(tokens, self.heads, 512), random(tokens, self.heads, 64)
        self.index_query = random(tokens, self.index_heads, 128)
        self.weights = random(tokens, self.index_heads)
        self.history = {
            name: [random(length, size) for length in self.seq_lens] for name, size in ROWS.items()
        }
        self._make_caches(g)

    def _make_caches(self, g: torch.Generator) -> None:
        counts = [math.ceil(n / self.block_size) for n in self.seq_lens]
        total = sum(counts) + 3
        order = torch.randperm(total, generator=g).tolist()
        self.block_table = torch.zeros(len(counts), max([1, *counts]) + 1, dtype=torch.int32)
        for row, count in enumerate(counts):
            for column in range(count):
                self.block_table[row, column] = order.pop()
        self.caches = {name: self._cache(total, size) for name, size in ROWS.items()}
        if self.one_tensor:
            whole = self._cache(total, 576)
            self.caches["latent"], self.caches["rope"] = whole.split([512, 64], -1)
        for row, length in enumerate(self.seq_lens):
            for position in range(length - self.query_lens[row]):
                block = int(self.block_table[row, position // self.block_size])
                for name, cache in self.caches.items():
                    cache[block, 0, position % self.block_size] = self.history[name][row][position]

    def _cache(self, blocks: int, size: int) -> torch.Tensor:
        return torch.full((blocks, 1, self.block_size, size), math.nan, dtype=self.dtype)

    def new_rows(self, name: str) -> torch.Tensor:
        pairs = zip(self.history[name], self.query_lens, strict=True)
        new = [rows[len(rows) - count :] for rows, count in pairs]
        return torch.cat([torch.zeros(0, ROWS[name], dtype=self.dtype), *new])

    def batch(self) -> AttentionBatch:
        return AttentionBatch.from_lengths(
            self.query_lens,
            self.seq_lens,
            self.block_size,
            block_table=self.block_table,
            causal=self.causal,
        )

    def impl(self) -> AscendSFAImpl:
        return AscendSFAImpl(self.heads, self.scale)

    def build(self, batch: AttentionBatch | None = None) -> AscendSFAMetadata:
        builder = AscendSFAMetadataBuilder(
            self.block_size, kernel_block_size=self.kernel_block_size
        )
        return builder.build(batch or self.batch())

    def write(self, batch: AttentionBatch) -> None:
        slots, rows = batch.slot_mapping, batch.num_token_rows
        new = {name: padded(self.new_rows(name), rows) for name in ROWS}
        latent, rope, index = (self.caches[name] for name in ROWS)
        self.impl().write_kv(new["latent"], new["rope"], latent, rope, slots)
        self.indexer().write_kv(new["index"], index, slots)

    def indexer(self) -> AscendSFAIndexerImpl:
        return AscendSFAIndexerImpl(self.index_heads, self.top_k)

    def choose(self, batch: AttentionBatch | None = None) -> torch.Tensor:
        batch = batch or self.batch()
        builder = AscendSFAIndexerMetadataBuilder(
            self.block_size, kernel_block_size=self.kernel_block_size
        )
        rows = batch.num_token_rows
        return self.indexer().forward(
            padded(self.index_query, rows),
            padded(self.weights, rows),
            self.caches["index"],
            builder.build(batch),
        )

    def run(self, batch: AttentionBatch | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(choice, output) after writing this step's rows; rows of padding included."""
        batch = batch or self.batch()
        self.write(batch)
        chosen = self.choose(batch)
        query = [padded(part, batch.num_token_rows) for part in self.query]
        output = torch.full_like(query[0], math.nan)
        caches = self.caches["latent"], self.caches["rope"]
        self.impl().forward(*query, *caches, chosen, self.build(batch), output)
        return chosen, output

    def seen(self) -> list[tuple[int, int]]:
        """(request, visible keys) of every token."""
        return [
            (row, length - count + i + 1 if self.causal else length)
            for row, (count, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True))
            for i in range(count)
        ]

    def scores(self, token: int) -> torch.Tensor:
        """float64 scores of the keys that a token sees."""
        row, limit = self.seen()[token]
        keys = self.history["index"][row][:limit].double()
        total = torch.zeros(limit, dtype=torch.float64)
        for head in range(self.index_heads):
            product = keys @ self.index_query[token, head].double()
            total += self.weights[token, head].double() * product.clamp(min=0)
        return total

    def best(self, token: int) -> list[int]:
        """Positions of the best keys, best first."""
        return self.scores(token).argsort(descending=True)[: self.top_k].tolist()

    def attention(self, token: int, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 output [N, 512] and lse [N] over some positions of the token's request."""
        row, _ = self.seen()[token]
        latent = self.history["latent"][row][positions].double()
        rope = self.history["rope"][row][positions].double()
        scores = self.query[0][token].double() @ latent.T + self.query[1][token].double() @ rope.T
        scores = scores * self.scale
        return torch.softmax(scores, -1) @ latent, torch.logsumexp(scores, -1)


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor with rows of NaN behind it: whoever reads padding is found out."""
    tail = tensor.new_full((rows - len(tensor), *tensor.shape[1:]), math.nan)
    return torch.cat([tensor, tail])
