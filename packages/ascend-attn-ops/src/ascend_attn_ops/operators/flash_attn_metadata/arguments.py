"""Argument record of flash_attn_metadata."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record


@arguments_record
class FlashAttnMetadataArguments:
    """Plan the work of :func:`flash_attn`: which core computes which blocks (A5 only).

    Query lengths come from ``seqused_q``, else the differences of ``cu_seqlens_q``, else
    ``max_seqlen_q`` for each of ``batch_size`` requests; key lengths likewise.

    Attributes:
        num_heads_q: Nq.
        num_heads_kv: Nkv, a divisor of Nq.
        head_dim: D, 64, 128 or 256.
        cu_seqlens_q: (B+1,) int32, starts with 0, non-decreasing; for TND queries only.
        cu_seqlens_kv: (B+1,) int32; for TND keys only.
        seqused_q: (B,) int32 query tokens in use; replaces cu_seqlens_q.
        seqused_kv: (B,) int32 keys in use; must be given for paged keys.
        batch_size: B where no length tensor of the queries says it.
        max_seqlen_q: Largest query length, the same as in the flash_attn call; None or -1: unknown.
        max_seqlen_kv: Largest key length, likewise.
        mask_mode: 0 none, 3 causal, 4 window. Left out, CANN reads it as 1 and fails; the host
            reads it as 0.
        win_left: Keys to the left that stay visible (mode 4); None or -1: all.
        win_right: Keys to the right that stay visible (mode 4); None or -1: all.
        layout_q: BSND (also for None), BNSD or TND.
        layout_kv: BSND (also for None), BNSD, TND, PA_BBND, PA_BNBD or PA_NZ.
        layout_out: BSND (also for None), BNSD or TND.

    Returns metadata: (words,) int32 with ``words = 16 + 16 (cube + vector) B Nkv`` rounded up to
    a multiple of 4096. Records of 16 words: one head (sections, has-merge flag, m and s2 block
    sizes, cube cores, vector cores, output layout), then per section and cube core
    (bn, m, s2 start; bn, m, s2 end; first partial), then per section and vector core
    (bn, m, first partial, partials, first row, rows). The core counts are those of the profile
    (of the call, the context or ``ASCEND_HWPROFILE``; default: the A5 bin 950PR_9599 with
    36 cube and 72 vector cores).

    Without a length tensor the plan is made on the host: move it to the device yourself.

    Raises:
        OpArgumentError: A rule is broken, or length values that CANN's kernel rejects (a negative
            length, prefix sums that do not start with 0 or decrease).

    Source: ops-transformer flash_attn_metadata (torch extension schema, host check, AICPU kernel)
    and its SectionStreamK load balancer. Decision: where the balancer leaves a choice, cores stop
    where the slowest core has least to do.
    """

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    cu_seqlens_q: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cu_seqlens_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seqused_q: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seqused_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    batch_size: int | None = attrs.field(default=None, kw_only=True)
    max_seqlen_q: int | None = attrs.field(default=None, kw_only=True)
    max_seqlen_kv: int | None = attrs.field(default=None, kw_only=True)
    mask_mode: int | None = attrs.field(default=None, kw_only=True)
    win_left: int | None = attrs.field(default=None, kw_only=True)
    win_right: int | None = attrs.field(default=None, kw_only=True)
    layout_q: str | None = attrs.field(default=None, kw_only=True)
    layout_kv: str | None = attrs.field(default=None, kw_only=True)
    layout_out: str | None = attrs.field(default=None, kw_only=True)

    @property
    def requests(self) -> int:
        """B, from the first of seqused_q, cu_seqlens_q and batch_size that is given; else -1."""
        if self.seqused_q is not None:
            return self.seqused_q.shape[0]
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.shape[0] - 1
        return -1 if self.batch_size is None else self.batch_size

    @property
    def layouts(self) -> tuple[str, str, str]:
        """Layouts of queries, keys and output with None resolved."""
        return self.layout_q or "BSND", self.layout_kv or "BSND", self.layout_out or "BSND"

    @property
    def windows(self) -> tuple[int, int]:
        """(left, right) with None resolved to -1."""
        return known(self.win_left), known(self.win_right)

    @property
    def longest(self) -> tuple[int, int]:
        """Largest query and key length with None resolved to -1."""
        return known(self.max_seqlen_q), known(self.max_seqlen_kv)


def known(value: int | None) -> int:
    """The value, -1 for None (CANN's own reading of it)."""
    return -1 if value is None else value
