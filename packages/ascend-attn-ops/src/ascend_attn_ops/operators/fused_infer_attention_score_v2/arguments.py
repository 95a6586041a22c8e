"""Argument record of fused_infer_attention_score_v2."""

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
    parameters,
    tensor_or_list,
)
from .._shared.fused_infer.call import Call

UNLIMITED = 2147483647


@arguments_record
class FusedInferAttentionScoreV2Arguments:
    """Inference attention as version 1, with attention sinks and quantised queries.

    Formula, layouts, masks and paged forms: see ``FusedInferAttentionScoreArguments``. Version 2
    drops padding sizes, shared prefix and the v1 quantisation scales. A sink s of a head enlarges
    the denominator: ``out = sum_j exp(x_j - m) v_j / (sum_j exp(x_j - m) + exp(s - m))``.

    Attributes:
        query: By ``input_layout``; float16, bfloat16, or int8 with its scales (float32 on the
            host providers only).
        key: Like query with KN heads, or the paged cache; see version 1 for lists.
        value: Like key; its head size may differ where the documents allow it.
        query_rope: Rotary part of an MLA query, last dimension 64.
        key_rope: Rotary part of MLA keys.
        pse_shift: (B or 1, N, S, KS) position shift added to the scores.
        atten_mask: bool, int8 or uint8; 1 = do not attend. Mode 9 (tree): (B, S, S), or for T
            layouts (sum of squared query lengths,).
        actual_seq_qlen: Host integers; T layouts: cumulative query lengths, last == T.
        actual_seq_kvlen: Host integers; paged: plain lengths per request, also with TND.
        block_table: (B, max_blocks) int32 block ids.
        dequant_scale_query: float32 scale of an int8 query; the further ``dequant_*`` belong to
            key, value and key_rope.
        quant_scale_out: Scale of an int8 output; ``quant_offset_out`` its offset.
        quant_scale_p: Scale of quantised softmax weights.
        learnable_sink: (N,) bfloat16, one further score per head that has no value.
        num_query_heads: N.
        num_key_value_heads: KN; 0 means N.
        softmax_scale: Multiplies the scores; the default is 1.0, not 1/sqrt(D).
        pre_tokens: Keys to the left that stay visible, itself not counted (modes 0 and 4).
        next_tokens: Keys to the right that stay visible (modes 0 and 4).
        input_layout: Layout of the query and, after ``_``, of the output.
        sparse_mode: 0 to 4 as in version 1, 9 tree mask (judged, not computed on the host).
        block_size: Tokens per block of the paged cache.
        query_quant_mode: How the query is quantised; 3 = per token and head.
        inner_precise: Bit 0: 1 = high performance; bit 1: zero fully masked rows.
        return_softmax_lse: Whether lse is computed; refused beside a sink (decision).
        query_dtype: The ``*_dtype`` arguments name packed dtypes that torch lacks.
        out: The caller's [attention_out, softmax_lse], filled and returned (``.out`` overload).

    Returns (attention_out, softmax_lse) as version 1.

    Source: op-plugin documents of npu_fused_infer_attention_score_v2; torch_npu 2.13 schema.
    """

    query: torch.Tensor
    key: torch.Tensor = tensor_or_list()
    value: torch.Tensor = tensor_or_list()
    query_rope: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    key_rope: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    pse_shift: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    atten_mask: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    actual_seq_qlen: IntList | None = int_list(default=None, kw_only=True)
    actual_seq_kvlen: IntList | None = int_list(default=None, kw_only=True)
    block_table: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale_query: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale_key: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_offset_key: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale_value: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_offset_value: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    dequant_scale_key_rope: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    quant_scale_out: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    quant_offset_out: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    quant_scale_p: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    learnable_sink: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    num_query_heads: int = attrs.field(default=1, kw_only=True)
    num_key_value_heads: int = attrs.field(default=0, kw_only=True)
    softmax_scale: float = attrs.field(default=1.0, kw_only=True)
    pre_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    next_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    input_layout: str = attrs.field(default="BSH", kw_only=True)
    sparse_mode: int = attrs.field(default=0, kw_only=True)
    block_size: int = attrs.field(default=0, kw_only=True)
    query_quant_mode: int = attrs.field(default=0, kw_only=True)
    key_quant_mode: int = attrs.field(default=0, kw_only=True)
    value_quant_mode: int = attrs.field(default=0, kw_only=True)
    inner_precise: int = attrs.field(default=0, kw_only=True)
    return_softmax_lse: bool = attrs.field(default=False, kw_only=True)
    query_dtype: int | None = attrs.field(default=None, kw_only=True)
    key_dtype: int | None = attrs.field(default=None, kw_only=True)
    value_dtype: int | None = attrs.field(default=None, kw_only=True)
    query_rope_dtype: int | None = attrs.field(default=None, kw_only=True)
    key_rope_dtype: int | None = attrs.field(default=None, kw_only=True)
    key_shared_prefix_dtype: int | None = attrs.field(default=None, kw_only=True)
    value_shared_prefix_dtype: int | None = attrs.field(default=None, kw_only=True)
    dequant_scale_query_dtype: int | None = attrs.field(default=None, kw_only=True)
    dequant_scale_key_dtype: int | None = attrs.field(default=None, kw_only=True)
    dequant_scale_value_dtype: int | None = attrs.field(default=None, kw_only=True)
    dequant_scale_key_rope_dtype: int | None = attrs.field(default=None, kw_only=True)
    out_dtype: int | None = attrs.field(default=None, kw_only=True)
    out: TensorList | None = given_outputs(default=None, kw_only=True)

    @cached_property
    def call(self) -> Call:
        """The call in the vocabulary that both versions share."""
        return Call(
            query=self.query,
            key=self.key,
            value=self.value,
            pse=self.pse_shift,
            mask=self.atten_mask,
            q_lens=self.actual_seq_qlen,
            kv_lens=self.actual_seq_kvlen,
            block_table=self.block_table,
            query_rope=self.query_rope,
            key_rope=self.key_rope,
            sink=self.learnable_sink,
            out_scale=self.quant_scale_out,
            out_offset=self.quant_offset_out,
            key_scale=self.dequant_scale_key,
            value_scale=self.dequant_scale_value,
            query_scale=self.dequant_scale_query,
            other_quant=self._other_quant(),
            heads=self.num_query_heads,
            kv_heads_given=self.num_key_value_heads,
            scale=self.softmax_scale,
            pre=self.pre_tokens,
            nxt=self.next_tokens,
            layout=self.input_layout,
            mode=self.sparse_mode,
            inner_precise=self.inner_precise,
            block_size=self.block_size,
            key_mode=self.key_quant_mode,
            value_mode=self.value_quant_mode,
            query_mode=self.query_quant_mode,
            lse=self.return_softmax_lse,
            out=self.out,
        )

    def _other_quant(self) -> tuple[str, ...]:
        tensors = ("dequant_offset_key", "dequant_offset_value", "dequant_scale_key_rope")
        names = [*tensors, "quant_scale_p"]
        names += [p.name for p in parameters(type(self)) if p.name.endswith("_dtype")]
        return tuple(name for name in names if getattr(self, name) is not None)
