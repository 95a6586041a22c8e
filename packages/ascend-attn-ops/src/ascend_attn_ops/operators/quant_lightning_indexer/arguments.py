"""Argument record of quant_lightning_indexer (torch_npu V1 signature)."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record
from .._shared.sequences import Sequences

UNLIMITED = 2**63 - 1


@arguments_record
class QuantLightningIndexerArguments:
    """lightning_indexer on quantised query and key.

    ``score[i, j] = sum_h weights[i, h] * ReLU(<query[i, h], key[j]> * query_dequant_scale[i, h] *
    key_dequant_scale[j])``; choice, masks, -1 filling and ties as in lightning_indexer.

    Dimensions: N at most 64 index heads, one key head, D = 128, k = sparse_count.

    Attributes:
        query: BSND (B, S1, N, D) or TND (T1, N, D); int8, on Ascend950 also float8_e4m3fn or the
            bytes of hifloat8.
        key: Like query with one head, or PA_BSND (num_blocks, block_size, 1, D).
        weights: (B, S1, N) or (T1, N), float16 or bfloat16 as the quantisation wants it. weights *
            query_dequant_scale must fit float16 on A3.
        query_dequant_scale: Shape of weights, float16 or float32.
        key_dequant_scale: Shape of key without D, float16 or float32.
        query_quant_mode: Only 0 (per token and head).
        key_quant_mode: Only 0.
        actual_seq_lengths_query: int32 (B,); TND: cumulative without a leading 0; BSND: lengths.
        actual_seq_lengths_key: int32 (B,); TND: cumulative; BSND and PA_BSND: lengths.
        block_table: int32 (B, M) block ids for PA_BSND, else None.
        layout_query: BSND or TND.
        layout_key: BSND, TND or PA_BSND; equal to layout_query unless PA_BSND.
        sparse_count: k; 1..2048.
        sparse_mode: 0 all keys, 3 causal.
        pre_tokens: Only 2**63 - 1.
        next_tokens: Only 2**63 - 1.
        query_dtype: torch_npu.hifloat8 where the bytes of query are hifloat8, else None.
        key_dtype: Like query_dtype.

    Returns sparse_indices int32 (B, S1, 1, k) or (T1, 1, k).

    Raises OpArgumentError with every broken rule.

    Source: op-plugin document npu_quant_lightning_indexer; torch_npu 2.13 schema.
    """

    query: torch.Tensor
    key: torch.Tensor
    weights: torch.Tensor
    query_dequant_scale: torch.Tensor
    key_dequant_scale: torch.Tensor
    query_quant_mode: int
    key_quant_mode: int
    actual_seq_lengths_query: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    actual_seq_lengths_key: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    block_table: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    layout_query: str = attrs.field(default="BSND", kw_only=True)
    layout_key: str = attrs.field(default="BSND", kw_only=True)
    sparse_count: int = attrs.field(default=2048, kw_only=True)
    sparse_mode: int = attrs.field(default=3, kw_only=True)
    pre_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    next_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    query_dtype: int | None = attrs.field(default=None, kw_only=True)
    key_dtype: int | None = attrs.field(default=None, kw_only=True)

    @property
    def sequences(self) -> Sequences:
        """Layouts and lengths of the call."""
        return Sequences(
            self.layout_query,
            self.layout_key,
            self.query,
            self.key,
            self.actual_seq_lengths_query,
            self.actual_seq_lengths_key,
            self.block_table,
        )

    @property
    def hifloat8(self) -> bool:
        """Whether the bytes are hifloat8."""
        return self.query_dtype is not None or self.query.dtype == torch.uint8
