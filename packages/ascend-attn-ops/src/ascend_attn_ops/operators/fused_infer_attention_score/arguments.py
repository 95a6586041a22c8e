"""Argument record of fused_infer_attention_score (v1)."""

from __future__ import annotations

from functools import cached_property

import attrs
import torch

from ...arguments import (
    IntList,
    TensorList,
    arguments_record,
    given_outputs,
    int_list,
    tensor_or_list,
)
from .._shared.fused_infer.call import Call

UNLIMITED = 2147483647
_OTHER_QUANT = (
    "dequant_scale1",
    "quant_scale1",
    "dequant_scale2",
    "antiquant_offset",
    "key_antiquant_offset",
    "value_antiquant_offset",
    "key_rope_antiquant_scale",
)


@arguments_record
class FusedInferAttentionScoreArguments:
    """Inference attention over whole or paged keys.

    ``out = softmax(scale * Q K^T + pse_shift, masked) V``; ``lse = ln sum exp`` of the scores.

    Mask by ``sparse_mode`` for effective lengths Lq, Lkv (0-based query i, key j):
    0 no mask tensor: all keys, else the full mask ANDed with the band measured from the top left;
    1 full mask; 2 ``j <= i``; 3 ``j <= i + Lkv - Lq``;
    4 ``i + Lkv - Lq - pre_tokens <= j <= i + Lkv - Lq + next_tokens``.
    Modes 2, 3 and 4 want the 2048 x 2048 template with 1 strictly above the diagonal.

    Paged keys (``block_table`` given): key and value are (num_blocks, block_size, KN*D),
    (num_blocks, KN, block_size, D) or NZ (num_blocks, KN, D/16, block_size, 16).

    Layouts: BSH (B, S, N*D), BSND (B, S, N, D), BNSD (B, N, S, D), TND (T, N, D), NTD (N, T, D);
    ``A_B`` reads A and writes B, where NBSD is (N, B, S, D).

    Attributes:
        query: By ``input_layout``; float16 or bfloat16 (float32 on the host providers only), int8
            with the quantisation scales.
        key: Like query with KN heads, or the paged cache. aclnn also takes a list with one
            tensor of batch 1 per request; it is judged, not run.
        value: Like key; its head size may differ where the documents allow it.
        pse_shift: (B or 1, N, S, KS) position shift added to the scores.
        atten_mask: bool, int8 or uint8; 1 = do not attend. Full masks are (S, KS), (1 or B, S, KS)
            or (1 or B, 1, S, KS), and (B, KS) when S = 1; they may be larger than needed.
        actual_seq_lengths: Host integers; T layouts: cumulative query lengths, last == T.
        actual_seq_lengths_kv: Host integers; paged: plain lengths per request, also with TND.
        block_table: (B, max_blocks) int32 block ids.
        quant_scale2: Scale of an int8 output; ``quant_offset2`` its offset.
        query_padding_size: (1,) int64, rows of padding behind left-padded queries.
        kv_padding_size: Likewise for keys.
        key_shared_prefix: Keys of batch 1 in front of those of every request.
        value_shared_prefix: Their values.
        actual_shared_prefix_len: One length of the prefix.
        query_rope: Rotary part of an MLA query, last dimension 64.
        key_rope: Rotary part of MLA keys.
        num_heads: N.
        scale: Multiplies the scores; the default is 1.0, not 1/sqrt(D).
        pre_tokens: Keys to the left that stay visible, itself not counted (modes 0 and 4).
        next_tokens: Keys to the right that stay visible (modes 0 and 4).
        input_layout: Layout of the query and, after ``_``, of the output.
        num_key_value_heads: KN; 0 means N.
        inner_precise: Bit 0: 1 = high performance; bit 1: zero fully masked rows.
        block_size: Tokens per block of the paged cache.
        softmax_lse_flag: Whether lse is computed.
        out: The caller's [attention_out, softmax_lse], filled and returned (``.out`` overload).

    The remaining arguments quantise keys or the whole computation; the rules judge them, the host
    providers do not compute them.

    Returns (attention_out, lse): attention_out in the output layout, dtype of query; lse float32,
    T layouts (T, N, 1), otherwise (B, N, S, 1), (0,) when not asked for. Rows without keys: out 0
    (decision; CANN leaves them undefined in some modes), lse +inf.

    Source: op-plugin documents of npu_fused_infer_attention_score; torch_npu 2.13 schema.
    """

    query: torch.Tensor
    key: torch.Tensor = tensor_or_list()
    value: torch.Tensor = tensor_or_list()
    pse_shift: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    atten_mask: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    actual_seq_lengths: IntList | None = int_list(default=None, kw_only=True)
    actual_seq_lengths_kv: IntList | None = int_list(default=None, kw_only=True)
    dequant_scale1: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    quant_scale1: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale2: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    quant_scale2: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    quant_offset2: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    antiquant_scale: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    antiquant_offset: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    key_antiquant_scale: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    key_antiquant_offset: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    value_antiquant_scale: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    value_antiquant_offset: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    block_table: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    query_padding_size: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    kv_padding_size: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    key_shared_prefix: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    value_shared_prefix: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    actual_shared_prefix_len: IntList | None = int_list(default=None, kw_only=True)
    query_rope: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    key_rope: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    key_rope_antiquant_scale: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    num_heads: int = attrs.field(default=1, kw_only=True)
    scale: float = attrs.field(default=1.0, kw_only=True)
    pre_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    next_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    input_layout: str = attrs.field(default="BSH", kw_only=True)
    num_key_value_heads: int = attrs.field(default=0, kw_only=True)
    sparse_mode: int = attrs.field(default=0, kw_only=True)
    inner_precise: int = attrs.field(default=0, kw_only=True)
    block_size: int = attrs.field(default=0, kw_only=True)
    antiquant_mode: int = attrs.field(default=0, kw_only=True)
    key_antiquant_mode: int = attrs.field(default=0, kw_only=True)
    value_antiquant_mode: int = attrs.field(default=0, kw_only=True)
    softmax_lse_flag: bool = attrs.field(default=False, kw_only=True)

    out: TensorList | None = given_outputs(default=None, kw_only=True)

    @cached_property
    def call(self) -> Call:
        """The call in the vocabulary that both versions share."""
        quant = (n for n in _OTHER_QUANT if getattr(self, n) is not None)
        return Call(
            query=self.query,
            key=self.key,
            value=self.value,
            pse=self.pse_shift,
            mask=self.atten_mask,
            q_lens=self.actual_seq_lengths,
            kv_lens=self.actual_seq_lengths_kv,
            block_table=self.block_table,
            query_rope=self.query_rope,
            key_rope=self.key_rope,
            prefix=(self.key_shared_prefix, self.value_shared_prefix),
            prefix_lens=self.actual_shared_prefix_len,
            padding=(self.query_padding_size, self.kv_padding_size),
            out_scale=self.quant_scale2,
            out_offset=self.quant_offset2,
            key_scale=self.key_antiquant_scale,
            value_scale=self.value_antiquant_scale,
            pair_scale=self.antiquant_scale,
            other_quant=tuple(quant),
            heads=self.num_heads,
            kv_heads_given=self.num_key_value_heads,
            scale=self.scale,
            pre=self.pre_tokens,
            nxt=self.next_tokens,
            layout=self.input_layout,
            mode=self.sparse_mode,
            inner_precise=self.inner_precise,
            block_size=self.block_size,
            key_mode=self.key_antiquant_mode,
            value_mode=self.value_antiquant_mode,
            lse=self.softmax_lse_flag,
            out=self.out,
        )
