"""The rotary embeddings of the CANN operators, by name. cos and sin broadcast over x."""

from __future__ import annotations

import torch


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + D/2); input and output in half order."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (2i, 2i + 1); input and output in interleaved order."""
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x * cos + turned * sin


def rotate_interleaved_to_half(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Pairs (2i, 2i + 1); input interleaved, output in half order, cos and sin in half order."""
    return rotate_half(torch.cat((x[..., 0::2], x[..., 1::2]), -1), cos, sin)


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``gamma * x / sqrt(mean(x ** 2) + epsilon)`` over the last dimension."""
    return gamma * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
