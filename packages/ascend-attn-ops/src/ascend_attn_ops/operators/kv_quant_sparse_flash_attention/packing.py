"""The packed row: 512 quantised latents, 64 rotary elements, 4 scales; 656 bytes."""

from __future__ import annotations

import torch

LATENT = 512
TILE = 128
ROPE_BYTES = 128


def unpack(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent (..., 512) and rotary part (..., 64), both in ``dtype``.

    Args:
        rows: (..., 656) of an 8-bit dtype.
        dtype: float16 or bfloat16: the dtype of the rotary bytes and of the result.
    """
    quantised = rows[..., :LATENT].float()
    tail = rows[..., LATENT:].contiguous().view(torch.uint8)
    rope = tail[..., :ROPE_BYTES].contiguous().view(dtype)
    scales = tail[..., ROPE_BYTES:].contiguous().view(torch.float32)
    return (quantised * scales.repeat_interleave(TILE, -1)).to(dtype), rope
