"""Argument record of sparse_flash_mla."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record
from ..sparse_flash_mla_metadata.arguments import SparseFlashMlaMetadataArguments

PAGED = "PA_BBND"


@arguments_record
class SparseFlashMlaArguments:
    """Attention over a window of the original keys and over compressed keys, with one softmax.

    Keys are also the values and are shared by all heads. With ``s_j = softmax_scale * <q_i, k_j>``
    over the visible keys of both kinds and the sink ``z`` of the head,
    ``m = max(max_j s_j, z)``,
    ``out_i = sum_j exp(s_j - m) k_j / (sum_j exp(s_j - m) + exp(z - m))``.

    Visible to query i of Lq, with Lori original and Lcmp compressed keys, r = cmp_residual_kv:

    * original key j with ``p = Lori - Lq + i``: all (ori_mask_mode 0), ``j <= p`` (3),
      ``p - ori_win_left <= j <= p + ori_win_right`` (4; -1 is no limit);
    * compressed key t: all (cmp_mask_mode 0), or
      ``t < floor((Lcmp * cmp_ratio + r - Lq + i + 1) / cmp_ratio)`` (3), the keys whose last token
      is not in the future;
    * with cmp_sparse_indices only those t that the row lists.

    The three scenarios: sliding window (no cmp_kv, cmp_ratio 1, cmp_mask_mode 0), all compressed
    keys (cmp_kv, no indices), selected compressed keys (cmp_kv and indices).

    Dimensions: B requests, S queries each or T in all, N heads, D = 512, K entries.

    Attributes:
        q: BSND (B, S, N, D) or TND (T, N, D); float16 or bfloat16 (float32 and float64 on the host
            only); N 1..128, a power of two on A2 and A3.
        ori_kv: BSND (B, S2, 1, D), TND (T2, 1, D) or PA_BBND (num_blocks, block_size, 1, D); blocks
            may lie apart.
        cmp_kv: Compressed keys in the same forms, or None.
        ori_sparse_indices: Reserved, must be None.
        cmp_sparse_indices: int32 (B, S, 1, K) or (T, 1, K) compressed positions, -1 for none.
        ori_block_table: int32 (B, M), exactly for PA_BBND.
        cmp_block_table: int32 (B, M), exactly for PA_BBND with cmp_kv.
        cu_seqlens_q: int32 (B + 1,), first 0, exactly for TND queries.
        cu_seqlens_ori_kv: int32 (B + 1,), exactly for TND keys.
        cu_seqlens_cmp_kv: int32 (B + 1,), exactly for TND keys with cmp_kv.
        seqused_q: int32 (B,) queries in use; the rest is padding.
        seqused_ori_kv: int32 (B,); required for PA_BBND.
        seqused_cmp_kv: int32 (B,); required for PA_BBND with cmp_kv (the vendor's texts disagree).
        cmp_residual_kv: int32 (B,) tokens behind the last compressed one; required with cmp_kv,
            cmp_mask_mode 3 and cmp_ratio > 1.
        ori_topk_length: Reserved, must be None.
        cmp_topk_length: int32 (B, S, 1) or (T, 1) entries that a row reads; only with cmp_mask_mode
            0 and indices.
        sinks: float32 (N,); required on every product. The host computes without, too.
        metadata: int32 (1024,) of sparse_flash_mla_metadata for the same lengths, masks and K;
            required on every product. The host needs none.
        softmax_scale: Multiplies the scores.
        cmp_ratio: Tokens per compressed key, 1..128; A2 and A3: 4 with indices, 128 without.
        ori_mask_mode: 0, 3 or 4.
        cmp_mask_mode: 0 or 3; 0 without cmp_kv.
        ori_win_left: 127 on A2 and A3. Builds of the vendor's package differ in this default (-1
            or 127) and the next (-1 or 0): always pass both.
        ori_win_right: 0 on A2 and A3.
        layout_q: BSND or TND.
        layout_kv: layout_q or PA_BBND; both layout defaults are those of the documents.
        topk_value_mode: 1.
        return_softmax_lse: Whether the second output is computed.

    Returns (attention_out, softmax_lse): attention_out like q; softmax_lse float32 (B, 1, S, N) or
    (1, T, N), the natural logarithm of the sum over the keys without the sink, as documented
    (whether the kernel leaves the sink out is unverified), or of shape () when not asked for.

    Decisions where the documents are silent: rows that see no key and padding rows are 0 with lse
    -inf; -1 entries are skipped wherever they stand, entries that the row may not see too; a
    repeated entry counts as often as it is listed. Weights are not rounded to the input dtype on
    the host, which the kernels do. Tolerances are those of sparse_flash_attention (unverified).

    Merging by :func:`merge_partials` needs calls without sinks (host only): the output of a shard
    is scaled by its sink.

    Raises OpArgumentError with every broken rule.

    Source: ops-transformer docs sparse_flash_mla (cann_ops_transformer); vllm-ascend
    csrc/attention/sparse_attn_sharedkv.
    """

    q: torch.Tensor
    ori_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cmp_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    ori_sparse_indices: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cmp_sparse_indices: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    ori_block_table: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cmp_block_table: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cu_seqlens_q: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cu_seqlens_ori_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cu_seqlens_cmp_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seqused_q: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seqused_ori_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seqused_cmp_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cmp_residual_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    ori_topk_length: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cmp_topk_length: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    sinks: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    metadata: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    softmax_scale: float = attrs.field(default=1.0, kw_only=True)
    cmp_ratio: int = attrs.field(default=1, kw_only=True)
    ori_mask_mode: int = attrs.field(default=4, kw_only=True)
    cmp_mask_mode: int = attrs.field(default=3, kw_only=True)
    ori_win_left: int = attrs.field(default=-1, kw_only=True)
    ori_win_right: int = attrs.field(default=-1, kw_only=True)
    layout_q: str = attrs.field(default="BSND", kw_only=True)
    layout_kv: str = attrs.field(default="BSND", kw_only=True)
    topk_value_mode: int = attrs.field(default=1, kw_only=True)
    return_softmax_lse: bool = attrs.field(default=False, kw_only=True)

    @property
    def batch(self) -> int:
        """B: the number of requests."""
        if self.layout_q == "BSND":
            return self.q.shape[0]
        return 0 if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1

    @property
    def has_compressed(self) -> bool:
        """Whether compressed keys take part."""
        return self.cmp_kv is not None

    @property
    def has_indices(self) -> bool:
        """Whether rows choose among the compressed keys."""
        return self.cmp_sparse_indices is not None

    def plan_arguments(self) -> SparseFlashMlaMetadataArguments:
        """Arguments of the sparse_flash_mla_metadata call that belongs to this call.

        The longest query of a TND call is not known without reading lengths; its number does not
        change the plan, so the number of rows stands for it.
        """
        lengths = (
            "cu_seqlens_q", "cu_seqlens_ori_kv", "cu_seqlens_cmp_kv", "seqused_q",
            "seqused_ori_kv", "seqused_cmp_kv", "cmp_residual_kv", "cmp_topk_length",
        )  # fmt: skip
        masks = (
            "cmp_ratio", "ori_mask_mode", "cmp_mask_mode", "ori_win_left", "ori_win_right",
            "layout_q", "layout_kv",
        )  # fmt: skip
        indices = self.cmp_sparse_indices
        return SparseFlashMlaMetadataArguments(
            self.q.shape[-2],
            1,
            self.q.shape[-1],
            batch_size=self.batch,
            max_seqlen_q=self.q.shape[-3],
            max_seqlen_ori_kv=_length(self.ori_kv),
            max_seqlen_cmp_kv=_length(self.cmp_kv),
            cmp_topk=0 if indices is None else indices.shape[-1],
            has_cmp_kv=self.has_compressed,
            **{name: getattr(self, name) for name in (*lengths, *masks)},
        )


def _length(keys: torch.Tensor | None) -> int:
    """Keys per request of a batched tensor; unused for other layouts."""
    return 0 if keys is None or keys.dim() < 4 else keys.shape[1]
