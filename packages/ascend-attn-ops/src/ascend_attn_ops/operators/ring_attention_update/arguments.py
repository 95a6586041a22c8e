"""Argument record of ring_attention_update."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record


@arguments_record
class RingAttentionUpdateArguments:
    """Merge two attention results by softmax maximum and sum, as ring attention does.

    ``max = max(prev_max, cur_max)``, ``p = prev_sum * exp(prev_max - max)``,
    ``c = cur_sum * exp(cur_max - max)``, ``sum = p + c`` and
    ``attn_out = (prev_attn_out * p + cur_attn_out * c) / sum``, in float32. Where both sums are 0
    the result is NaN, as the formula says.

    Attributes:
        prev_attn_out: SBH (S, B, H), H = N * D, or TND (T, N, D); float16, bfloat16 or float32.
        prev_softmax_max: float32, SBH (B, N, S, 8) or TND (T, N, 8); each value 8 times.
        prev_softmax_sum: As prev_softmax_max.
        cur_attn_out: As prev_attn_out.
        cur_softmax_max: As prev_softmax_max.
        cur_softmax_sum: As prev_softmax_max.
        actual_seq_qlen: int64 prefix sums of the query lengths from 0; required for TND.
        input_layout: ``"SBH"`` or ``"TND"``.
        input_softmax_layout: ``""``, ``"SBH"`` or ``"TND"``; only looked at for TND. How the rows
            are ordered for "SBH" there is (unverified): the host providers leave it out.

    Returns attn_out, softmax_max, softmax_sum in the shapes and dtypes of the prev arguments.

    Source: op-plugin docs npu_ring_attention_update; torch_npu 2.13 meta kernel.
    """

    prev_attn_out: torch.Tensor
    prev_softmax_max: torch.Tensor
    prev_softmax_sum: torch.Tensor
    cur_attn_out: torch.Tensor
    cur_softmax_max: torch.Tensor
    cur_softmax_sum: torch.Tensor
    actual_seq_qlen: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    input_layout: str = attrs.field(default="SBH", kw_only=True)
    input_softmax_layout: str = attrs.field(default="", kw_only=True)

    @property
    def softmax(self) -> dict[str, torch.Tensor]:
        """The four softmax tensors by name."""
        return {
            "prev_softmax_max": self.prev_softmax_max,
            "prev_softmax_sum": self.prev_softmax_sum,
            "cur_softmax_max": self.cur_softmax_max,
            "cur_softmax_sum": self.cur_softmax_sum,
        }
