"""Random numbers: torch's generator, seeded by the operator's seed and offset.

The numbers are not those of an NPU; equal seeds give equal numbers, different offsets others.
"""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import kernel

_WORD = 2**64
_TINY = 2.0**-53  # the smallest step of a uniform number
_ODD = 0x9E3779B97F4A7C15  # spreads neighbouring offsets over the seeds


def _generator(a: Any) -> torch.Generator:
    return torch.Generator().manual_seed((a.seed + a.offset * _ODD) % _WORD - _WORD // 2)


def _uniform(a: Any, shape: torch.Size) -> torch.Tensor:
    return torch.rand(shape, generator=_generator(a), dtype=torch.float64)


kernel("aclnnInplaceNormal")(
    lambda a: a.mean + a.std * torch.randn(a.self_ref.shape, generator=_generator(a))
)
kernel("aclnnInplaceBernoulli", "aclnnInplaceBernoulliTensor")(
    lambda a: _uniform(a, a.self_ref.shape) < a.prob
)
kernel("aclnnRandperm")(lambda a: torch.randperm(a.n, generator=_generator(a)))
kernel("aclnnMultinomial")(
    lambda a: torch.multinomial(a.self, a.numsamples, a.replacement, generator=_generator(a))
)


@kernel("aclnnInplaceUniform")
def uniform(a: Any) -> torch.Tensor:
    """Uniform in [from, to)."""
    low = getattr(a, "from")
    return _uniform(a, a.self_ref.shape).mul(a.to - low).add(low)


@kernel("aclnnSimThreadExponential")
def exponential(a: Any) -> torch.Tensor:
    """Exponentially distributed: never 0, which samplers divide by."""
    return torch.log1p(-_uniform(a, a.self_ref.shape)).neg().clamp(min=_TINY).div(a.rate)


@kernel("aclnnInplaceRandom")
def random(a: Any) -> torch.Tensor:
    """Integers in [from, to)."""
    low = getattr(a, "from")
    return torch.randint(low, a.to, a.self_ref.shape, generator=_generator(a))


@kernel("aclnnDropoutGenMaskV2")
def dropout_mask(a: Any) -> torch.Tensor:
    """One bit per element, 1 where it stays."""
    stays = _uniform(a, torch.Size([torch.Size(a.shape).numel()])) >= a.prob
    return _packed(stays, a.out.numel()).view(a.out.shape)


def _packed(bits: torch.Tensor, size: int) -> torch.Tensor:
    """Bits in ``size`` bytes, the lowest bit of a byte first; the rest is 0."""
    padded = torch.zeros(size * 8, dtype=torch.uint8)
    padded[: bits.numel()] = bits.flatten()
    weights = 2 ** torch.arange(8, dtype=torch.uint8)
    return (padded.view(-1, 8) * weights).sum(-1, dtype=torch.uint8)


@kernel("aclnnDropoutV3")
def dropout_with_mask(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both at once, as Ascend950 has it."""
    stays = _uniform(a, a.input.shape) >= a.p
    scaled = torch.where(stays, a.input / (1 - a.p), 0)
    return scaled, _packed(stays, a.mask_out.numel()).view(a.mask_out.shape)


@kernel("aclnnDropoutDoMask")
def dropout(a: Any) -> torch.Tensor:
    """Elements whose bit is 1, scaled by the chance to stay; 0 elsewhere."""
    bits = (a.mask.flatten()[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    stays = bits.flatten()[: a.self.numel()].view(a.self.shape).bool()
    return torch.where(stays, a.self / (1 - a.prob), 0)
