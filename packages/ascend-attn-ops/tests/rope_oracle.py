"""Rotary embedding and RMS norm in float64, as rotations of complex numbers; shared by tests."""

from __future__ import annotations

import numpy
import torch

HALF, INTERLEAVED = "half", "interleaved"


def angles(positions: numpy.ndarray, size: int, base: float = 10000.0) -> numpy.ndarray:
    """(.., size / 2) angle of each pair."""
    return positions[..., None] * base ** (-numpy.arange(0, size, 2) / size)


def tables(angle: numpy.ndarray, order: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """cos and sin as the operators want them: every angle twice, in the order of the pairs."""
    wide = numpy.concatenate([angle, angle], -1) if order == HALF else numpy.repeat(angle, 2, -1)
    return torch.from_numpy(numpy.cos(wide)).to(dtype), torch.from_numpy(numpy.sin(wide)).to(dtype)


def rotate(x: torch.Tensor, angle: numpy.ndarray, source: str, target: str) -> numpy.ndarray:
    """Turn the pairs of ``x``, found in ``source`` order, by ``angle``; write ``target`` order."""
    values = x.double().numpy()
    size = values.shape[-1] // 2
    if source == HALF:
        pairs = values[..., :size] + 1j * values[..., size:]
    else:
        pairs = values[..., ::2] + 1j * values[..., 1::2]
    pairs = pairs * numpy.exp(1j * angle)
    if target == HALF:
        return numpy.concatenate([pairs.real, pairs.imag], -1)
    return numpy.stack([pairs.real, pairs.imag], -1).reshape(values.shape)


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> numpy.ndarray:
    values = x.double().numpy()
    length = numpy.sqrt((values**2).sum(-1, keepdims=True) / values.shape[-1] + epsilon)
    return values / length * gamma.double().numpy()
