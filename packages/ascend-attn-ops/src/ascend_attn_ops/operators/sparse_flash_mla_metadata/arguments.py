"""Argument record of sparse_flash_mla_metadata."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record


@arguments_record
class SparseFlashMlaMetadataArguments:
    """Plan the work of :func:`sparse_flash_mla`: which core computes which query rows.

    A *row* is one block of the fused (query, head) axis of a request; its blocks are runs of its
    visible original and compressed keys. Rows are dealt out to the cores in order, each core up to
    its share of the work that is left; no row is split over cores.

    The two functions have different mask defaults (0 and 0 here, 4 and 3 there): pass masks and
    windows to both. Lengths must be those of the :func:`sparse_flash_mla` call.

    Attributes:
        num_heads_q: N, 1..128; a power of two on A2 and A3.
        num_heads_kv: 1.
        head_dim: 512.
        cu_seqlens_q: int32 (B + 1,), first 0, exactly for TND queries.
        cu_seqlens_ori_kv: int32 (B + 1,), exactly for TND keys.
        cu_seqlens_cmp_kv: int32 (B + 1,), exactly for TND keys with compressed keys.
        seqused_q: int32 (B,) queries in use.
        seqused_ori_kv: int32 (B,) original keys in use; required for PA_BBND.
        seqused_cmp_kv: int32 (B,) compressed keys in use; required for PA_BBND with compressed
            keys (the vendor's texts disagree).
        cmp_residual_kv: int32 (B,) tokens behind the last compressed one, 0 .. cmp_ratio - 1;
            required with compressed keys, cmp_mask_mode 3 and cmp_ratio > 1.
        ori_topk_length: Reserved, must be None.
        cmp_topk_length: int32 (B, S, 1) or (T, 1) entries that each row reads; only with
            cmp_mask_mode 0 and cmp_topk > 0.
        batch_size: B where neither seqused_q nor cu_seqlens_q says it.
        max_seqlen_q: Longest query; must be given for TND, and for BSND without seqused_q, where
            it is the length of every query.
        max_seqlen_ori_kv: Length of the original keys where no tensor says it.
        max_seqlen_cmp_kv: Length of the compressed keys where no tensor says it.
        ori_topk: Reserved, 0.
        cmp_topk: K of the compressed indices, 0 without them; 512 or 1024 on A2 and A3.
        cmp_ratio: Tokens per compressed key, 1 without compressed keys.
        ori_mask_mode: 0 all, 3 causal, 4 window.
        cmp_mask_mode: 0 all, 3 causal; 0 without compressed keys.
        ori_win_left: Keys to the left that stay visible in mode 4, -1 all.
        ori_win_right: Keys to the right that stay visible in mode 4, -1 all.
        layout_q: BSND or TND.
        layout_kv: BSND, TND or PA_BBND.
        has_ori_kv: Must be true.
        has_cmp_kv: Whether the call has compressed keys. True by default: pass False for a sliding
            window alone, otherwise behaviour is undefined (no checker compares it with the call).

    Returns metadata: int32 (1024,). 36 records of 9 words, one per cube core: enabled, then start
    (request, row, block) and end (request, row, block), first partial result (0), and on Ascend950
    with more than 64 heads the largest number of blocks of a core. Then 72 records of 8 words for
    merging split rows, all 0. With more than 64 heads on Ascend950 two cores share the heads of a
    row, so their records are pairs. The core counts are those of the profile (of the call, the
    context or ``ASCEND_HWPROFILE``; default: the A5 bin 950PR_9599).

    Decision: when no row sees a key, the first core is given all rows, so that each is written.

    Raises:
        OpArgumentError: A rule is broken, or length values that CANN's kernel rejects (negative
            or decreasing lengths, a residual outside 0 .. cmp_ratio - 1).

    Source: ops-transformer docs sparse_flash_mla (cann_ops_transformer), attention/
    sparse_flash_mla_metadata AICPU kernel.
    """

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    cu_seqlens_q: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cu_seqlens_ori_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cu_seqlens_cmp_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seqused_q: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seqused_ori_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seqused_cmp_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cmp_residual_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    ori_topk_length: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cmp_topk_length: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    batch_size: int = attrs.field(default=0, kw_only=True)
    max_seqlen_q: int = attrs.field(default=0, kw_only=True)
    max_seqlen_ori_kv: int = attrs.field(default=0, kw_only=True)
    max_seqlen_cmp_kv: int = attrs.field(default=0, kw_only=True)
    ori_topk: int = attrs.field(default=0, kw_only=True)
    cmp_topk: int = attrs.field(default=0, kw_only=True)
    cmp_ratio: int = attrs.field(default=1, kw_only=True)
    ori_mask_mode: int = attrs.field(default=0, kw_only=True)
    cmp_mask_mode: int = attrs.field(default=0, kw_only=True)
    ori_win_left: int = attrs.field(default=-1, kw_only=True)
    ori_win_right: int = attrs.field(default=-1, kw_only=True)
    layout_q: str = attrs.field(default="BSND", kw_only=True)
    layout_kv: str = attrs.field(default="BSND", kw_only=True)
    has_ori_kv: bool = attrs.field(default=True, kw_only=True)
    has_cmp_kv: bool = attrs.field(default=True, kw_only=True)

    @property
    def batch(self) -> int:
        """B, from the first of seqused_q, cu_seqlens_q and batch_size that says it."""
        if self.seqused_q is not None:
            return self.seqused_q.numel()
        if self.layout_q == "TND" and self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.numel() - 1
        return self.batch_size

    @property
    def has_compressed(self) -> bool:
        """Whether compressed keys take part; the name that sparse_flash_mla uses too."""
        return self.has_cmp_kv

    @property
    def has_indices(self) -> bool:
        """Whether rows choose among the compressed keys."""
        return self.has_cmp_kv and self.cmp_topk > 0
