"""Argument record of compressor."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record, mutated


@arguments_record
class CompressorArguments:
    """Compress every ``cmp_ratio`` tokens of a request into one key (DeepSeek V4).

    ``kv = x wkv^T``, ``score = x wgate^T + ape[position % c]`` with c = cmp_ratio. Group g is the
    tokens ``g c .. g c + c - 1`` of the request. Its key is the sum of kv over its rows, weighted
    per channel by the softmax of their scores; then RMSNorm, then the rotary embedding of the last
    rope_head_dim channels. With coff 1 the rows are the c tokens of the group; with coff 2
    (overlap) also the c tokens of the group before: those with the first half of the 2 D channels,
    the group's own with the second half. The first group of a request has no predecessor: those
    rows have weight 0.

    A call brings tokens ``start_pos .. start_pos + length - 1`` of each request and returns the
    keys of the ``(start_pos + length) // c - start_pos // c`` groups that end in it. What a later
    call needs, the tokens of the unfinished group and with overlap those of the last finished one,
    is kept in kv_state and score_state (score with ape), at the token's position through the block
    tables. Table entry 0 means no write. Both tables are read at the positions of earlier tokens
    of the groups that end now, whatever the entry is.

    Dimensions: T tokens or B requests of S, H hidden, W = coff * D. Combinations (D, coff, c) on
    products: (512, 2, 4), (128, 2, 4) for the keys of the indexer, (512, 1, 128).

    Attributes:
        x: (T, H) with cu_seqlens, or (B, S, H); float16 or bfloat16 (float32 and float64 on the
            host). Products: H 1024..10240, a multiple of 512.
        wkv: (W, H), dtype of x.
        wgate: (W, H), dtype of x.
        kv_state: float32 (num_blocks, block_size, W), updated in place. It may be the front half
            of one tensor with 2 W channels whose rear half is score_state (the state_cache of
            vllm-ascend's form): the host takes any strides.
        score_state: float32 (num_blocks, block_size, W), updated in place.
        ape: float32 (c, W).
        norm_weight: (D,), dtype of x (float32 too on the host).
        rope_sin: Rows of the returned keys: (min(T, T // c + B), 64) or (B, ceil(S / c), 64); dtype
            of x or float32. Element 2 i and 2 i + 1 (interleaved), or i and i + 32 (half), belong
            to one pair.
        rope_cos: Like rope_sin.
        kv_block_table: int32 (B, M) block of each block_size positions.
        score_block_table: int32 (B, M).
        cu_seqlens: int32 (B + 1,), first 0; for (T, H) only.
        seqused: int32 (B,) tokens in use; None: all.
        start_pos: int32 (B,) position of the first token; None: 0.
        rope_head_dim: 64 on products.
        cmp_ratio: c.
        coff: 1 or 2.
        norm_eps: Epsilon of the norm.
        rotary_mode: 2 interleaved; 1 half (the default) is declared, but products take 2 only.
        enabled_grad: False; training is not available.

    Returns (cmp_kv, and four empty outputs of training whose shapes are (unverified)): cmp_kv
    (min(T, T // c + B), D) with the keys of all requests packed, or (B, ceil(S / c), D), dtype of
    x. Rows without a key are 0; what a kernel leaves there is (unverified).

    Newer builds of the vendor's package have another function of this name, with one state_cache
    and without norm and rotary embedding; this record is the documented form.

    Raises OpArgumentError with every broken rule.

    Source: ops-transformer docs compressor (cann_ops_transformer); vllm-ascend
    csrc/attention/compressor (README, host checks); the kept tokens and the treatment of the first
    group follow the vendor's test of this form.
    """

    x: torch.Tensor
    wkv: torch.Tensor
    wgate: torch.Tensor
    kv_state: torch.Tensor = mutated()
    score_state: torch.Tensor = mutated()
    ape: torch.Tensor
    norm_weight: torch.Tensor
    rope_sin: torch.Tensor
    rope_cos: torch.Tensor
    kv_block_table: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    score_block_table: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    cu_seqlens: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    seqused: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    start_pos: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    rope_head_dim: int = attrs.field(kw_only=True)
    cmp_ratio: int = attrs.field(kw_only=True)
    coff: int = attrs.field(default=1, kw_only=True)
    norm_eps: float = attrs.field(default=1e-6, kw_only=True)
    rotary_mode: int = attrs.field(default=1, kw_only=True)
    enabled_grad: bool = attrs.field(default=False, kw_only=True)

    @property
    def batched(self) -> bool:
        """Whether x is (B, S, H)."""
        return self.x.dim() == 3

    @property
    def batch(self) -> int:
        """B: the number of requests."""
        if self.batched:
            return self.x.shape[0]
        return 0 if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def head_size(self) -> int:
        """D."""
        return self.norm_weight.shape[0]
