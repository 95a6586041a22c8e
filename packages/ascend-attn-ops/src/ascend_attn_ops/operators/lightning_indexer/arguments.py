"""Argument record of lightning_indexer."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record
from .._shared.sequences import Sequences

UNLIMITED = 2**63 - 1


@arguments_record
class LightningIndexerArguments:
    """The ``sparse_count`` best keys of each query row, one choice for all heads.

    ``score[i, j] = sum_h weights[i, h] * ReLU(<query[i, h], key[j]>)``: heads are added before the
    choice, and no 1/sqrt(D) is applied. Row i of Lq may choose from the first ``Lk`` (sparse_mode
    0) or ``Lk - Lq + i + 1`` (3, causal aligned bottom right) keys of its request.

    Dimensions: N at most 64 index heads, one key head, D = 128, k = sparse_count.

    Attributes:
        query: BSND (B, S1, N, D) or TND (T1, N, D); float16 or bfloat16 (float32 and float64 on
            the host providers only).
        key: BSND (B, S2, 1, D), TND (T2, 1, D) or PA_BSND (num_blocks, block_size, 1, D).
        weights: (B, S1, N) or (T1, N), dtype of query, or float32 except on Ascend950.
        actual_seq_lengths_query: int32 (B,); TND: cumulative without a leading 0; BSND: lengths.
        actual_seq_lengths_key: int32 (B,); TND: cumulative; BSND and PA_BSND: lengths.
        block_table: int32 (B, M) block ids for PA_BSND, else None.
        layout_query: BSND or TND.
        layout_key: BSND, TND or PA_BSND; equal to layout_query unless PA_BSND.
        sparse_count: k; 1..2048 or a multiple of 1024.
        sparse_mode: 0 all keys, 3 causal.
        pre_tokens: Only 2**63 - 1.
        next_tokens: Only 2**63 - 1.
        return_value: Whether the scores are returned; not with PA_BSND on a product.

    Returns (sparse_indices, sparse_values): int32 (B, S1, 1, k) or (T1, 1, k) positions in the
    request's own keys, by descending score; values of the same shape in the dtype of query, or (0,)
    when not asked for. A row that may choose from fewer than k keys has -1 (value -inf) behind
    them; rows without keys and padding rows are all -1 (decision: the vendor's golden lists masked
    positions there). Ties may be broken either way (unverified rule); NaN scores are undefined.

    Raises OpArgumentError with every broken rule.

    Source: op-plugin document npu_lightning_indexer; vllm-ascend csrc/attention/lightning_indexer;
    torch_npu 2.13 schema.
    """

    query: torch.Tensor
    key: torch.Tensor
    weights: torch.Tensor
    actual_seq_lengths_query: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    actual_seq_lengths_key: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    block_table: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    layout_query: str = attrs.field(default="BSND", kw_only=True)
    layout_key: str = attrs.field(default="BSND", kw_only=True)
    sparse_count: int = attrs.field(default=2048, kw_only=True)
    sparse_mode: int = attrs.field(default=3, kw_only=True)
    pre_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    next_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    return_value: bool = attrs.field(default=False, kw_only=True)

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
