"""Argument record of rotary_position_embedding."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record


@arguments_record
class RotaryPositionEmbeddingArguments:
    """Rotate a tensor, in the order of its elements (torch_npu's npu_rotary_mul).

    ``half`` pairs (i, i + D/2): ``input * r1 + cat(-input[D/2:], input[:D/2]) * r2``.
    ``interleave`` pairs (2i, 2i + 1): ``input * r1 + turned * r2`` with
    ``turned[2i] = -input[2i + 1]``, ``turned[2i + 1] = input[2i]``. Both keep the order of their
    input, so that the same vector gives different results; interleave_rope takes interleaved pairs
    and returns half order.

    Attributes:
        input: (..., D) of rank 3 or 4, e.g. (B, S, N, D); float16, bfloat16 or float32.
        r1: Cosines, broadcast over input; last dimension D.
        r2: Sines, shape of r1.
        rotary_mode: ``"half"`` or ``"interleave"``.
        rotate: (D, D); when given, ``turned = input @ rotate`` whatever the mode says.

    Returns a tensor like input.

    Source: torch_npu docs npu_rotary_mul; aclnnRotaryPositionEmbedding.
    """

    input: torch.Tensor
    r1: torch.Tensor
    r2: torch.Tensor
    rotary_mode: str = "half"
    rotate: torch.Tensor | None = attrs.field(default=None)
