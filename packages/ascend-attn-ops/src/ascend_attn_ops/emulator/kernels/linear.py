"""Matrix products and normalisation, accumulated in float64 and rounded once."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import kernel


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.long()


_PRODUCTS = (
    "aclnnMatmul",
    "aclnnMm",
    "aclnnBatchMatMul",
    "aclnnMatmulWeightNz",
    "aclnnBatchMatMulWeightNz",
)
kernel(*_PRODUCTS)(lambda a: _wide(a.self) @ _wide(a.mat2))
kernel("aclnnMv")(lambda a: _wide(a.self) @ _wide(a.vec))
kernel("aclnnDot")(lambda a: _wide(a.self) @ _wide(a.tensor))
kernel("aclnnAddmm", "aclnnAddmmWeightNz")(
    lambda a: a.beta * _wide(a.self) + a.alpha * (_wide(a.mat1) @ _wide(a.mat2))
)
kernel("aclnnInplaceAddmm")(
    lambda a: a.beta * _wide(a.self_ref) + a.alpha * (_wide(a.mat1) @ _wide(a.mat2))
)
kernel("aclnnBaddbmm")(
    lambda a: a.beta * _wide(a.self) + a.alpha * (_wide(a.batch1) @ _wide(a.batch2))
)


@kernel("aclnnRmsNorm")
def rms_norm(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised, and the reciprocal root mean square of each row."""
    return _rms_norm(a.x.double(), a.gamma, a.epsilon)


@kernel("aclnnAddRmsNorm")
def add_rms_norm(a: Any) -> tuple[torch.Tensor, ...]:
    """The sum, rounded as an output is, then normalised."""
    total = (a.x1.double() + a.x2.double()).to(a.x1.dtype)
    return (*_rms_norm(total.double(), a.gamma, a.epsilon), total)


def _rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    axes = list(range(x.dim() - gamma.dim(), x.dim()))
    scale = (x.pow(2).mean(axes, keepdim=True) + epsilon).rsqrt()
    return x * scale * gamma.double(), scale


@kernel("aclnnLayerNorm")
def layer_norm(a: Any) -> tuple[torch.Tensor, ...]:
    """Normalised, mean and reciprocal standard deviation."""
    x = a.input.double()
    axes = list(range(x.dim() - len(a.normalized_shape), x.dim()))
    mean = x.mean(axes, keepdim=True)
    scale = (x.var(axes, correction=0, keepdim=True) + a.eps).rsqrt()
    out = (x - mean) * scale
    out = out if a.weight is None else out * a.weight.double()
    return out if a.bias is None else out + a.bias.double(), mean, scale


@kernel("aclnnSwiGlu")
def swiglu(a: Any) -> torch.Tensor:
    """``silu(first half) * second half``."""
    gate, up = a.x.double().chunk(2, a.dim)
    return torch.mul(torch.nn.functional.silu(gate), up)
