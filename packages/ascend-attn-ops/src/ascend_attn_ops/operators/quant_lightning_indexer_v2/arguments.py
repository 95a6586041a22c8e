"""Argument record of quant_lightning_indexer_v2 (cann_ops_transformer V2 form)."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record


@arguments_record
class QuantLightningIndexerV2Arguments:
    """The ``topk`` best keys from quantised query and key, also over compressed keys.

    ``score[i, j] = sum_h w[i, h] * ReLU(<q[i, h], k[j]> * scales)``: int8 and float8 have one scale
    per query row and head and one per key; mxfp8 one per group of 32 elements; hifloat8 one for
    each tensor. Row i of Lq may choose from all Lk keys (mask_mode 0) or, with mask_mode 3, from
    the first ``floor((Lk * cmp_ratio + cmp_residual_k - Lq + i + 1) / cmp_ratio)`` of them
    (rounding unverified).

    Unlike V1: mask_mode defaults to 0, cumulative lengths have B + 1 entries with a leading 0, and
    the paged layout is called PA_BBND.

    Attributes:
        q: BSND (B, S1, N, 128) or TND (T1, N, 128); dtype by quant_mode.
        k: BSND (B, S2, 1, 128), TND (T2, 1, 128) or PA_BBND (num_blocks, block_size, 1, 128).
        w: (B, S1, N) or (T1, N).
        q_descale: Shape of w; mxfp8 and mxfp4: q with (D / 64, 2) in place of D; hifloat8: (1,).
        k_descale: Like q_descale for k.
        topk: k.
        quant_mode: 1 float8_e4m3fn, 2 int8, 3 mxfp8, 4 hifloat8, 5 mxfp4.
        cu_seqlens_q: int32 (B + 1,) for TND queries, else None.
        cu_seqlens_k: int32 (B + 1,) for TND keys, else None.
        seqused_q: int32 (B,) real rows of each request; the rest is padding.
        seqused_k: int32 (B,) keys of each request; required for PA_BBND.
        cmp_residual_k: int32 (B,) uncompressed keys behind the last compressed one; exactly with
            cmp_ratio != 1 and mask_mode != 0.
        block_table: int32 (B, M) block ids for PA_BBND, else None.
        output_idx_offset: Added to the positions; shape and meaning beyond that are (unverified).
        metadata: int32 (1024,) of quant_lightning_indexer_metadata; required on Ascend950. The host
            providers need none.
        max_seqlen_q: Longest query, -1 unknown.
        layout_q: BSND or TND; this default is (unverified).
        layout_k: BSND, TND or PA_BBND; this default is (unverified).
        mask_mode: 0 all keys, 3 causal.
        cmp_ratio: Uncompressed keys per key.
        return_value: 1 returns the scores.
        candidate_topk_index: vllm-ascend's private extension (two-level choice): block ids of 8
            keys that a consumer layer may choose from.
        candidate_mode: Extension: 1 source, 2 consumer, 3 off.
        candidate_topk_blocks: Extension: published blocks.
        candidate_block_size: Extension: keys per block.

    The four candidate arguments are not part of the cann_ops_transformer function: they are checked
    here, and passed by no provider.

    Returns (indices, values): int32 (B, S1, 1, k) or (T1, 1, k), -1 behind the valid ones and in
    padding rows; bfloat16 scores of the same shape, -inf there, or (0,).

    Raises OpArgumentError with every broken rule.

    Source: ops-transformer torch_extension document quant_lightning_indexer; vllm-ascend
    csrc/attention/quant_lightning_indexer_v2/op_host.
    """

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    topk: int
    quant_mode: int
    cu_seqlens_q: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cu_seqlens_k: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seqused_q: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seqused_k: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cmp_residual_k: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    block_table: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    output_idx_offset: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    metadata: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    max_seqlen_q: int = attrs.field(default=-1, kw_only=True)
    layout_q: str = attrs.field(default="BSND", kw_only=True)
    layout_k: str = attrs.field(default="BSND", kw_only=True)
    mask_mode: int = attrs.field(default=0, kw_only=True)
    cmp_ratio: int = attrs.field(default=1, kw_only=True)
    return_value: int = attrs.field(default=0, kw_only=True)
    candidate_topk_index: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    candidate_mode: int = attrs.field(default=3, kw_only=True)
    candidate_topk_blocks: int = attrs.field(default=2048, kw_only=True)
    candidate_block_size: int = attrs.field(default=8, kw_only=True)

    @property
    def paged(self) -> bool:
        """Whether keys are a paged cache."""
        return self.layout_k == "PA_BBND"

    @property
    def batch(self) -> int:
        """B: the number of requests."""
        if self.layout_q == "BSND":
            return self.q.shape[0]
        return 0 if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1

    @property
    def compressed_causal(self) -> bool:
        """Whether the mask is measured in uncompressed keys."""
        return self.cmp_ratio != 1 and self.mask_mode != 0
