"""Argument record of gather_pa_kv_cache."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record, mutated


@arguments_record
class GatherPaKvCacheArguments:
    """Read the keys and values of requests out of the paged KV cache, one request after another.

    Request ``i`` contributes ``n`` rows: ``seq_lens[i]``, or with ``is_seq_lens_cumsum`` the
    difference ``seq_lens[i + 1] - seq_lens[i]``. Its row ``j`` comes from column
    ``seq_offset[i] // block_size + j // block_size`` of its block table row, at position
    ``j % block_size`` of that block: an offset moves by whole blocks, its remainder is ignored.
    A block id outside the cache, and a column outside the table, give zeros. Rows of ``key`` and
    ``value`` beyond the sum of the lengths are left alone; rows that do not fit are dropped.

    Attributes:
        key_cache: (num_blocks, block_size, N, Dk), or in FRACTAL_NZ order
            (num_blocks, N*Dk/L, block_size, L) with L = 32 / itemsize. Host tensors do not carry
            a format, so that the host providers take the first form only (decision).
        value_cache: Same with Dv, which may differ from Dk.
        block_tables: (B, M) int32 or int64 (int64: unverified).
        seq_lens: (B,), or (B + 1,) prefix sums; dtype of block_tables.
        key: (T, N, Dk), written in place, T >= the sum of the lengths.
        value: (T, N, Dv), written in place.
        seq_offset: (B,) first token to read of each request; dtype of block_tables.
        is_seq_lens_cumsum: Whether seq_lens holds prefix sums.

    Source: torch_npu 2.13 schema; op-plugin test test_npu_gather_pa_kv_cache.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    key: torch.Tensor = mutated()
    value: torch.Tensor = mutated()
    seq_offset: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    is_seq_lens_cumsum: bool = attrs.field(default=False, kw_only=True)

    @property
    def is_nd(self) -> bool:
        """Whether both caches have the plain (num_blocks, block_size, N, D) shape."""
        pairs = ((self.key_cache, self.key), (self.value_cache, self.value))
        return all(cache.shape[2:] == rows.shape[1:] for cache, rows in pairs)

    @property
    def block_size(self) -> int:
        """Tokens per cache block."""
        return self.key_cache.shape[1 if self.is_nd else 2]

    def lengths(self) -> torch.Tensor:
        """(B,) int64 rows of each request; negative lengths count as zero."""
        lengths = self.seq_lens.long()
        return (lengths.diff() if self.is_seq_lens_cumsum else lengths).clamp(min=0)

    def first_columns(self) -> torch.Tensor:
        """(B,) int64 first block table column of each request."""
        if self.seq_offset is None:
            return torch.zeros(self.block_tables.shape[0], dtype=torch.int64)
        return self.seq_offset.long() // self.block_size
