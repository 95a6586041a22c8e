"""Argument record of flash_attn."""

from __future__ import annotations

import torch

from ...arguments import arguments_record
from .._shared.flash_attn import is_paged, size_of
from ..flash_attn_metadata.arguments import FlashAttnMetadataArguments


@arguments_record
class FlashAttnArguments:
    """Attention with lengths on the device and a plan made beforehand (A5 only).

    ``out = softmax(softmax_scale * Q K^T, masked) V``; ``lse = ln sum exp`` of the scores, natural
    logarithm. Masks for effective lengths Lq, Lkv (0-based query i, key j):
    0 all keys; 3 ``j <= i + Lkv - Lq``;
    4 ``i + Lkv - Lq - win_left <= j <= i + Lkv - Lq + win_right``, -1 on a side: no limit.
    A window of W keys, itself included, is ``win_left = W - 1, win_right = 0``.

    Effective lengths: the shorter of the ``cu_seqlens`` difference (or S) and ``seqused``.

    Attributes:
        q: BSND (B, S, Nq, D), BNSD (B, Nq, S, D) or TND (T, Nq, D); float16 or bfloat16 (float32
            and float64 on the host providers only).
        k: Layout of ``layout_kv`` with Nkv heads: as q, or cache blocks PA_BBND
            (blocks, block_size, Nkv, D), PA_BNBD (blocks, Nkv, block_size, D) or PA_NZ
            (blocks, Nkv, D/16, block_size, 16).
        v: Like k.
        block_table: (B, max_blocks) int32 block ids; for paged keys only, and then required.
        cu_seqlens_q: (B+1,) int32 prefix sums from 0 to T; for TND queries only, then required.
        cu_seqlens_kv: (B+1,) int32 likewise for TND keys.
        seqused_q: (B,) int32 query tokens in use.
        seqused_kv: (B,) int32 keys in use; required for paged keys.
        sinks: (Nq,) float32 one further score per head without a value; CANN refuses it today. An
            empty tensor counts as absent.
        attn_mask: (2048, 2048) int8 template, 1 strictly above the diagonal; for modes 3 and 4.
        metadata: Plan from flash_attn_metadata for the same arguments. The host providers do not
            read it; the sanitizer compares it.
        softmax_scale: Multiplies the scores; the default is 1.0, not 1/sqrt(D).
        mask_mode: 0, 3 or 4.
        win_left: Keys to the left that stay visible, itself not counted; mode 4 only.
        win_right: Keys to the right that stay visible; mode 4 only.
        max_seqlen_q: Largest query length, as in the metadata call; -1: unknown.
        max_seqlen_kv: Largest key length, likewise.
        layout_q: BSND, BNSD or TND.
        layout_kv: The layout of q, or PA_BBND, PA_BNBD, PA_NZ.
        layout_out: The layout of q; BNSD queries may also give BSND.
        return_softmax_lse: Whether lse is computed.

    Returns (attn_out, softmax_lse): attn_out in ``layout_out`` with the dtype of q; softmax_lse
    float32 (Nq, T) for TND and (B, Nq, S) otherwise, (0,) when not asked for. Rows without keys
    and rows beyond the query length: out 0, lse +inf (decision where Lkv is 0: the vendor's golden
    prints 0 there). With sinks (decision, CANN has no kernel): the sink is part of the
    denominator and of lse; rows without keys stay 0 and +inf.

    Raises:
        OpArgumentError: A rule is broken.
        SanitizerError: Values or the plan are wrong (only when sanitizing).

    Source: ops-transformer flash_attn (README, host checkers, torch extension schema, tests).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_kv: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    attn_mask: torch.Tensor | None = None
    metadata: torch.Tensor | None = None
    softmax_scale: float = 1.0
    mask_mode: int = 0
    win_left: int = -1
    win_right: int = -1
    max_seqlen_q: int = -1
    max_seqlen_kv: int = -1
    layout_q: str = "BSND"
    layout_kv: str = "BSND"
    layout_out: str = "BSND"
    return_softmax_lse: bool = False

    @property
    def paged(self) -> bool:
        """Whether keys and values are cache blocks."""
        return is_paged(self.layout_kv)

    @property
    def requests(self) -> int:
        """B."""
        if self.layout_q != "TND":
            return self.q.shape[0]
        return 0 if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def heads(self) -> int:
        """Nq."""
        return size_of(self.q, self.layout_q, "N")

    @property
    def kv_heads(self) -> int:
        """Nkv."""
        return size_of(self.k, self.layout_kv, "N")

    @property
    def head_dim(self) -> int:
        """D."""
        return size_of(self.q, self.layout_q, "D")

    @property
    def block_size(self) -> int:
        """Slots per cache block."""
        return size_of(self.k, self.layout_kv, "L")

    @property
    def has_sinks(self) -> bool:
        """Whether sinks are given; an empty tensor counts as absent."""
        return self.sinks is not None and self.sinks.numel() > 0

    def plan_arguments(self) -> FlashAttnMetadataArguments:
        """Arguments of the flash_attn_metadata call that belongs to this call."""
        return FlashAttnMetadataArguments(
            self.heads,
            self.kv_heads,
            self.head_dim,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_kv=self.cu_seqlens_kv,
            seqused_q=self.seqused_q,
            seqused_kv=self.seqused_kv,
            batch_size=self.requests,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_kv=self.max_seqlen_kv,
            mask_mode=self.mask_mode,
            win_left=self.win_left,
            win_right=self.win_right,
            layout_q=self.layout_q,
            layout_kv=self.layout_kv,
            layout_out=self.layout_out,
        )
