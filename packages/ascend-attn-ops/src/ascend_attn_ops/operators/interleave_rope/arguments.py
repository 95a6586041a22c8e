"""Argument record of interleave_rope."""

from __future__ import annotations

import torch

from ...arguments import arguments_record


@arguments_record
class InterleaveRopeArguments:
    """Rotate interleaved pairs and return them in half order.

    With ``x1 = x[..., 0::2]`` and ``x2 = x[..., 1::2]``:
    ``y = cat(x1, x2) * cos + cat(-x2, x1) * sin``. The output is not interleaved again; compare
    rotary_position_embedding, whose two modes keep the order of their input.

    Attributes:
        x: (B, N, S, 64) float16 or bfloat16 (the host provider also takes float32).
        cos: (B, 1, S, 64) or (B, 1, 1, 64), halves repeated; dtype of x.
        sin: As cos.

    Returns a tensor like x.

    Source: op-plugin docs npu_interleave_rope.
    """

    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
