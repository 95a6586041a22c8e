"""Argument record of paged_attention."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record, mutated


@arguments_record
class PagedAttentionArguments:
    """Decode attention over paged caches: one query row per request, no mask (ATB, legacy).

    Row ``t`` attends to the first ``context_lens[t]`` tokens of the blocks of ``block_table[t]``:
    ``out[t, h] = softmax(scale_value * query[t, h] . K[:, h // (N / KN)]) V``. A row without keys
    gives 0 (decision: ATB does not say). There is no log-sum-exp.

    Attributes:
        query: (T, N, D) float16 or bfloat16 (float16 only on 310P; the host provider also takes
            float32).
        key_cache: (num_blocks, block_size, KN, D), or NZ (num_blocks, KN*D/L, block_size, L) with
            L = 32 / itemsize, as 310P has it; which one is read from the shape (decision).
        value_cache: The same with Dv, which may differ from D.
        num_kv_heads: KN.
        num_heads: N, a multiple of KN.
        scale_value: Factor of the scores, used as it is.
        block_table: (T, M) int32.
        context_lens: (T,) int32. Vendor tests pass it on the host and on the device; a device
            tensor may force a synchronisation on A2 and A3 (unverified).
        out: (T, N, Dv), written in place.
        workspace: uint8 buffer of ``_npu_paged_attention_get_workspace``, for graph capture; the
            host provider does not need it.

    Limits of head sizes and head ratio in ATB are (unverified) and not checked.

    Source: torch_npu 2.13 operator atb::_npu_paged_attention; op-plugin test
    test_atb_paged_attention.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    num_kv_heads: int
    num_heads: int
    scale_value: float
    block_table: torch.Tensor
    context_lens: torch.Tensor
    out: torch.Tensor = mutated()
    workspace: torch.Tensor | None = attrs.field(default=None, kw_only=True)

    @property
    def is_nd(self) -> bool:
        """Whether both caches have the plain (num_blocks, block_size, KN, D) shape."""
        pairs = ((self.key_cache, self.query), (self.value_cache, self.out))
        return all(
            tuple(cache.shape[2:]) == (self.num_kv_heads, rows.shape[2]) for cache, rows in pairs
        )

    @property
    def block_size(self) -> int:
        """Tokens per cache block."""
        return self.key_cache.shape[1 if self.is_nd else 2]
