"""Argument record of attention_update."""

from __future__ import annotations

import attrs

from ...arguments import TensorList, arguments_record, tensor_list


@arguments_record
class AttentionUpdateArguments:
    """Merge partial attention over disjoint key sets by log-sum-exp (natural logarithm).

    ``M = max_i lse_i``, ``L = M + ln(sum_i exp(lse_i - M))``,
    ``out = sum_i out_i * exp(lse_i - L)``, in float32. As in CANN, a row for which every part has
    lse -inf, and a row for which any part has +inf, comes out NaN: the sanitizer names such rows.
    ``PartialAttention`` and ``merge_partials`` treat them as rows without keys instead.

    Attributes:
        lse: 1 to 16 tensors (R,) float32, R = batch * tokens * heads.
        local_out: As many tensors (R, D) float32, float16 or bfloat16, D a multiple of 8 in
            8 .. 512.
        update_type: 0: only ``out`` has meaning; 1: ``lse_out`` too.

    Returns ``out`` (R, D) in the dtype of local_out and ``lse_out`` (R,) float32. With
    ``update_type`` 0 the host providers leave lse_out filled with zeros (decision: it has no
    meaning then).

    Source: op-plugin docs npu_attention_update; torch_npu 2.13 meta kernel.
    """

    lse: TensorList = tensor_list()
    local_out: TensorList = tensor_list()
    update_type: int = attrs.field()
