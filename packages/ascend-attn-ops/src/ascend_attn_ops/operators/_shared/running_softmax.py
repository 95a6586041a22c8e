"""Softmax over key tiles: no score tensor larger than one tile is ever needed."""

from __future__ import annotations

import attrs
import torch


@attrs.define(eq=False)
class RunningSoftmax:
    """Softmax-weighted sum of what was seen so far; leading dimensions are free.

    Attributes:
        maximum: (..., rows, 1) largest score, -inf before the first key.
        total: (..., rows, 1) sum of ``exp(score - maximum)``.
        weighted: (..., rows, D) sum of ``exp(score - maximum) * value``.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor

    @classmethod
    def start(cls, like: torch.Tensor, size: int, sinks: torch.Tensor | None) -> RunningSoftmax:
        """Nothing seen yet, or only the sinks: scores without a value.

        Args:
            like: (..., rows, anything) gives shape, dtype and device.
            size: D of the values.
            sinks: (rows,) one further score per row, or None.
        """
        shape = (*like.shape[:-1], 1)
        weighted = like.new_zeros((*like.shape[:-1], size))
        if sinks is None:
            return cls(like.new_full(shape, float("-inf")), like.new_zeros(shape), weighted)
        maximum = sinks.to(like.dtype)[:, None].expand(shape)
        return cls(maximum, like.new_ones(shape), weighted)

    def add(self, scores: torch.Tensor, value: torch.Tensor) -> None:
        """Take in a tile: scores (..., rows, tile), overwritten; value (..., tile, D)."""
        maximum = torch.maximum(self.maximum, scores.amax(-1, keepdim=True))
        shift = maximum.masked_fill(maximum.isneginf(), 0.0)
        weights = scores.sub_(shift).exp_()
        rescale = (self.maximum - shift).exp()
        self.total = self.total * rescale + weights.sum(-1, keepdim=True)
        self.weighted = self.weighted.mul_(rescale).add_(weights @ value)
        self.maximum = maximum

    def out(self) -> torch.Tensor:
        """(..., rows, D); 0 where no key was seen."""
        return self.weighted / self.total.masked_fill(self.total == 0, 1.0)
