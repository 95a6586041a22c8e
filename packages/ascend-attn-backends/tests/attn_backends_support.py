"""A dense float64 oracle and scenarios, written apart from the code that they check."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from hypothesis import strategies as st

from ascend_attn_backends import (
    AscendAttentionBackendImpl,
    AscendAttentionMetadataBuilder,
    AscendMetadata,
    AttentionBatch,
)

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    # Vendor comparison of the attention operators: half an ulp more than one bf16/fp16 rounding.
    torch.bfloat16: {"rtol": 2**-7, "atol": 5e-3},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}

UNWRITTEN = 1e4


def visible(query_len: int, kv_len: int, *, causal: bool, window: int | None) -> torch.Tensor:
    """[query_len, kv_len] bool from the definition: one pair of positions at a time."""
    allowed = torch.zeros(query_len, kv_len, dtype=torch.bool)
    for i in range(query_len):
        own = kv_len - query_len + i
        for j in range(kv_len):
            distance = own - j
            seen = distance >= 0 if causal else True
            if window is not None:
                seen = seen and abs(distance) < window
            allowed[i, j] = seen
    return allowed


def dense_request(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Attention of one request in float64: query [Lq, N, D], keys and values [Lkv, KN, D]."""
    query_len, heads, _ = query.shape
    group = heads // keys.shape[1]
    allowed = visible(query_len, keys.shape[0], causal=causal, window=window)
    out = torch.zeros(query.shape, dtype=torch.float64)
    for head in range(heads):
        k, v = keys[:, head // group].double(), values[:, head // group].double()
        scores = (query[:, head].double() @ k.T) * scale
        scores = scores.masked_fill(~allowed, -math.inf)
        out[:, head] = torch.softmax(scores, dim=-1).nan_to_num(0.0) @ v
    return out


@attrs.define(eq=False)
class Scenario:
    """Requests with their whole history of keys and values, and a paged cache that holds it."""

    query_lens: list[int]
    seq_lens: list[int]
    block_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    window: int | None = None
    causal: bool | Sequence[bool] = True
    dtype: torch.dtype = torch.float32
    seed: int = 0
    token_major: bool = True
    spare_blocks: int = 3

    query: torch.Tensor = attrs.field(init=False)
    keys: list[torch.Tensor] = attrs.field(init=False)
    values: list[torch.Tensor] = attrs.field(init=False)
    block_table: torch.Tensor = attrs.field(init=False)
    key_cache: torch.Tensor = attrs.field(init=False)
    value_cache: torch.Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(self.dtype)

        self.query = random(sum(self.query_lens), self.heads, self.head_size)
        self.keys = [random(n, self.kv_heads, self.head_size) for n in self.seq_lens]
        self.values = [random(n, self.kv_heads, self.head_size) for n in self.seq_lens]
        self._make_cache(g)

    def _make_cache(self, g: torch.Generator) -> None:
        """Blocks in random order; what no request owns is huge, so that any read shows."""
        counts = [math.ceil(n / self.block_size) for n in self.seq_lens]
        total = sum(counts) + self.spare_blocks
        order = torch.randperm(total, generator=g).tolist()
        self.block_table = torch.full((len(counts), max([1, *counts])), 0, dtype=torch.int32)
        for row, count in enumerate(counts):
            for column in range(count):
                self.block_table[row, column] = order.pop()
        shape = (total, self.kv_heads, self.block_size, self.head_size)
        if self.token_major:
            shape = (total, self.block_size, self.kv_heads, self.head_size)
        caches = [torch.full(shape, UNWRITTEN, dtype=self.dtype) for _ in range(2)]
        self.key_cache, self.value_cache = (
            cache.transpose(1, 2) if self.token_major else cache for cache in caches
        )
        for row, length in enumerate(self.seq_lens):
            for position in range(length - self.query_lens[row]):
                self.place(row, position)

    def place(self, row: int, position: int) -> None:
        block = int(self.block_table[row, position // self.block_size])
        offset = position % self.block_size
        self.key_cache[block, :, offset] = self.keys[row][position]
        self.value_cache[block, :, offset] = self.values[row][position]

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    def new_tokens(self, history: list[torch.Tensor]) -> torch.Tensor:
        """Keys or values of this step's tokens, [T, KN, D]."""
        parts = [x[len(x) - n :] for x, n in zip(history, self.query_lens, strict=True)]
        return torch.cat(parts)

    def batch(self, **changes: object) -> AttentionBatch:
        arguments = {"block_table": self.block_table, "causal": self.causal, **changes}
        return AttentionBatch.from_lengths(
            self.query_lens, self.seq_lens, self.block_size, **arguments
        )

    def impl(self) -> AscendAttentionBackendImpl:
        return AscendAttentionBackendImpl(
            self.heads, self.head_size, self.scale, self.kv_heads, self.window
        )

    def build(self, batch: AttentionBatch | None = None) -> AscendMetadata:
        return AscendAttentionMetadataBuilder(self.block_size).build(batch or self.batch())

    def run(
        self,
        batch: AttentionBatch | None = None,
        impl: AscendAttentionBackendImpl | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend; rows of padding included."""
        batch, impl = batch or self.batch(), impl or self.impl()
        metadata = self.build(batch)
        caches = (self.key_cache, self.value_cache)
        rows = batch.num_token_rows
        impl.write_kv(
            padded(self.new_tokens(self.keys), rows),
            padded(self.new_tokens(self.values), rows),
            *caches,
            metadata.slot_mapping,
        )
        query = padded(self.query, rows)
        output = torch.full_like(query, math.nan)
        return impl.forward(query, *caches, metadata, output)

    def expected(self) -> torch.Tensor:
        """float64, [T, N, D]."""
        causal = self.causal
        flags = [causal] * len(self.seq_lens) if isinstance(causal, bool) else causal
        parts, start = [], 0
        for row, length in enumerate(self.query_lens):
            parts.append(
                dense_request(
                    self.query[start : start + length],
                    self.keys[row],
                    self.values[row],
                    scale=self.scale,
                    causal=flags[row],
                    window=self.window,
                )
            )
            start += length
        return torch.cat(parts)

    def compare(self, output: torch.Tensor) -> None:
        """Raises AssertionError when the output differs from the oracle."""
        expected = self.expected()
        torch.testing.assert_close(
            output[: len(expected)].double(), expected, **TOLERANCES[self.dtype]
        )


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor with rows of NaN behind it: whoever reads padding is found out."""
    tail = tensor.new_full((rows - len(tensor), *tensor.shape[1:]), math.nan)
    return torch.cat([tensor, tail])


@st.composite
def steps(
    draw: st.DrawFn, max_reqs: int = 5, max_query: int = 9, max_computed: int = 40
) -> tuple[list[int], list[int]]:
    """(query_lens, seq_lens) of one step: prefills, chunks, decodes and verifications."""
    count = draw(st.integers(1, max_reqs))
    query = draw(st.lists(st.integers(1, max_query), min_size=count, max_size=count))
    computed = draw(st.lists(st.integers(0, max_computed), min_size=count, max_size=count))
    return query, [q + c for q, c in zip(query, computed, strict=True)]
