"""Latent attention in float64 from the formula, and steps over paged latent caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from attn_backends_support import UNWRITTEN, padded, visible

from ascend_attn_backends import (
    AscendMLABackend,
    AscendMLAImpl,
    AscendMLAMetadata,
    AscendMLAMetadataBuilder,
    AttentionBatch,
)

SCALE = 0.07


@attrs.define(eq=False)
class LatentScenario:
    """Requests with their whole history of latent and rotary rows."""

    query_lens: list[int]
    seq_lens: list[int]
    block_size: int = 16
    heads: int = 4
    causal: bool | Sequence[bool] = True
    dtype: torch.dtype = torch.float32
    seed: int = 0

    q_nope: torch.Tensor = attrs.field(init=False)
    q_pe: torch.Tensor = attrs.field(init=False)
    latents: list[torch.Tensor] = attrs.field(init=False)
    ropes: list[torch.Tensor] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(self.dtype)

        tokens = sum(self.query_lens)
        self.q_nope, self.q_pe = random(tokens, self.heads, 512), random(tokens, self.heads, 64)
        self.latents = [random(n, 512) for n in self.seq_lens]
        self.ropes = [random(n, 64) for n in self.seq_lens]

    def new_rows(self, history: list[torch.Tensor]) -> torch.Tensor:
        """Latent or rotary rows of this step's tokens."""
        parts = [x[len(x) - n :] for x, n in zip(history, self.query_lens, strict=True)]
        return torch.cat(parts)

    def batch(self) -> AttentionBatch:
        return AttentionBatch.from_lengths(
            self.query_lens, self.seq_lens, self.block_size, causal=self.causal
        )

    def caches(self, num_blocks: int) -> list[torch.Tensor]:
        """Caches whose unwritten rows are huge, so that any read shows."""
        shape = AscendMLABackend.cache_shape(num_blocks, self.block_size)
        return [kind.allocate(self.dtype).fill_(UNWRITTEN) for kind in (shape.latent, shape.rope)]

    def prepared(
        self, batch: AttentionBatch
    ) -> tuple[AscendMLAImpl, list[torch.Tensor], AscendMLAMetadata]:
        """Layer, caches with every row of every request, and metadata."""
        impl, metadata = AscendMLAImpl(self.heads, SCALE), self.build(batch)
        caches = self.caches(int(batch.block_table.max()) + 2)
        whole = AttentionBatch.from_lengths(self.seq_lens, self.seq_lens, self.block_size)
        rows = [torch.cat(history) for history in (self.latents, self.ropes)]
        impl.write_kv(*rows, *caches, whole.slot_mapping)
        return impl, caches, metadata

    def build(self, batch: AttentionBatch) -> AscendMLAMetadata:
        return AscendMLAMetadataBuilder(self.block_size).build(batch)

    def run(self, batch: AttentionBatch | None = None) -> torch.Tensor:
        """Output of every token row, padding included."""
        batch = batch or self.batch()
        impl, caches, metadata = self.prepared(batch)
        queries = [padded(q, batch.num_token_rows) for q in (self.q_nope, self.q_pe)]
        output = torch.full_like(queries[0], math.nan)
        assert impl.forward_mqa(*queries, *caches, metadata, output) is output
        return output

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 out [T, N, 512] and lse [T, N]."""
        causal = self.causal
        flags = [causal] * len(self.seq_lens) if isinstance(causal, bool) else causal
        outs, lses, start = [], [], 0
        for row, length in enumerate(self.query_lens):
            query = torch.cat([self.q_nope, self.q_pe], -1)[start : start + length].double()
            values = self.latents[row].double()
            keys = torch.cat([values, self.ropes[row].double()], -1)
            allowed = visible(length, len(keys), causal=flags[row], window=None)
            scores = torch.einsum("qnd,kd->nqk", query, keys) * SCALE
            scores = scores.masked_fill(~allowed, -math.inf)
            outs.append((torch.softmax(scores, -1).nan_to_num(0.0) @ values).transpose(0, 1))
            lses.append(torch.logsumexp(scores, -1).T)
            start += length
        return torch.cat(outs), torch.cat(lses)


class PoisonedCalls:
    """Mixed into a layer: requests without keys get NaN and a finite lse, as vllm 49294 had it."""

    def _call(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super()._call(*arguments, **options)  # type: ignore[misc] # a layer follows
        starts = (0, *options["actual_seq_lengths"])
        for row, keys in enumerate(options["actual_seq_lengths_kv"]):
            if keys == 0:
                rows = slice(starts[row], starts[row + 1])
                out[rows] = math.nan
                if lse.numel():
                    lse[rows] = 0.3
        return out, lse


class PoisonedMLAImpl(PoisonedCalls, AscendMLAImpl):
    """The latent layer over such an operator."""
