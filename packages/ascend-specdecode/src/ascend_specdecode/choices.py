"""Choosing one token per row from weights, with the random numbers given."""

from __future__ import annotations

from typing import Final, Protocol

import attrs
import torch
from torch import Tensor

_BLOCK: Final = 256


class Choice(Protocol):
    """Chooses the token that a step emits where no drafted one is."""

    def __call__(self, weights: Tensor, accepted: Tensor, rows: slice) -> Tensor:
        """Choose token v of row r with probability ``weights[r, v] / weights[r].sum()``.

        Args:
            weights: [R, V] >= 0, each row with a weight above 0; need not sum to 1.
            accepted: [R] int64, drafted tokens accepted before the chosen one.
            rows: which R of the B requests these are.

        Returns:
            [R] int64 in 0..V-1.
        """
        ...


@attrs.frozen(eq=False)
class InverseCdf:
    """One uniform number per token: the first token whose cumulative weight exceeds it.

    Attributes:
        uniforms: [B, K+1] float in [0, 1); column ``accepted[b]`` serves row b.
    """

    uniforms: Tensor

    def __call__(self, weights: Tensor, accepted: Tensor, rows: slice) -> Tensor:
        """See :class:`Choice`."""
        numbers = self.uniforms[rows].gather(1, accepted.unsqueeze(1))
        return inverse_cdf(weights, numbers.squeeze(1))


@attrs.frozen(eq=False)
class ExponentialRace:
    """Exponential noise per request and token, the way vLLM samples: the largest quotient wins.

    Attributes:
        inverse_noise: [B, V] float, 1 / e with e drawn from the exponential distribution.
    """

    inverse_noise: Tensor

    def __call__(self, weights: Tensor, accepted: Tensor, rows: slice) -> Tensor:
        """See :class:`Choice`; the same noise serves whatever number was accepted."""
        return _first_largest(weights * self.inverse_noise[rows])


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return per row the first token whose cumulative weight exceeds ``uniform * total``.

    A token of weight 0 is never chosen. The cumulative sum runs over blocks of 256 tokens in
    float64 and then within one block: one pass over the weights and no [B, V] temporary, and
    rounding as small as that of a block's own sum.

    Args:
        weights: [B, V] float, >= 0, each row with a weight above 0.
        uniforms: [B] float in [0, 1).

    Returns:
        [B] int64.
    """
    vocabulary = weights.shape[1]
    size = min(_BLOCK, vocabulary)
    sums = _block_sums(weights, size)
    until = sums.cumsum(dim=-1)
    threshold = uniforms.double() * until[:, -1]
    block = _first_above(until, threshold, sums)
    before = until.gather(1, block.unsqueeze(1)) - sums.gather(1, block.unsqueeze(1))
    places = block.unsqueeze(1) * size + torch.arange(size, device=weights.device)
    inside = places < vocabulary
    part = weights.gather(1, places.clamp(max=vocabulary - 1)).double() * inside
    # Rounding must not make it negative: that would choose a token of weight 0.
    offset = (threshold - before.squeeze(1)).clamp(min=0)
    return block * size + _first_above(part.cumsum(dim=-1), offset, part)


def _block_sums(weights: Tensor, size: int) -> Tensor:
    """Sum blocks of ``size`` columns, the last one shorter: [B, ceil(V / size)] float64."""
    whole = weights.shape[1] // size * size
    sums: Tensor = weights[:, :whole].unflatten(1, (-1, size)).sum(dim=-1)
    if whole < weights.shape[1]:
        rest = weights[:, whole:].sum(dim=-1, keepdim=True)
        sums = torch.cat([sums, rest], dim=-1)
    return sums.double()


def _first_above(cumulative: Tensor, threshold: Tensor, parts: Tensor) -> Tensor:
    """Return the first column above the threshold; where rounding left none, the last part > 0."""
    above = cumulative > threshold.unsqueeze(1)
    last = parts.shape[1] - 1 - (parts > 0).flip(1).byte().argmax(dim=1)
    return torch.where(above.any(dim=1), above.byte().argmax(dim=1), last)


def _first_largest(scores: Tensor) -> Tensor:
    """Return ``scores.argmax(-1)``, the first of equals: [B]. Blocks first, which is faster."""
    size = min(_BLOCK, scores.shape[1])
    whole = scores.shape[1] // size * size
    largest: Tensor = scores[:, :whole].unflatten(1, (-1, size)).amax(dim=-1)
    if whole < scores.shape[1]:
        rest = scores[:, whole:].amax(dim=-1, keepdim=True)
        largest = torch.cat([largest, rest], dim=-1)
    block = largest.argmax(dim=-1, keepdim=True)
    places = block * size + torch.arange(size, device=scores.device)
    # Beyond the end the last score is seen again, behind itself.
    part = scores.gather(1, places.clamp(max=scores.shape[1] - 1))
    return block.squeeze(1) * size + part.argmax(dim=-1)
