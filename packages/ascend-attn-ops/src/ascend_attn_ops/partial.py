"""Attention over a part of the keys, in one convention for all layers above the operators.

Operators report rows without keys in different ways (fused_infer_attention_score and flash_attn
say lse = +inf, sparse_flash_attention says maximum = sum = 0); the converters here hide that.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch


@attrs.frozen(eq=False)
class PartialAttention:
    """Attention of T query rows over some of their keys.

    Attributes:
        out: (T, N, D) softmax-weighted values; 0 where a row has no key.
        lse: (T, N) float32 natural-log sum of exponentials; -inf where a row has no key.
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def from_infinite_lse(cls, out: torch.Tensor, lse: torch.Tensor) -> PartialAttention:
        """From an operator that marks rows without keys by an infinite lse of either sign.

        Args:
            out: (T, N, D).
            lse: (T, N) or (T, N, 1) float32; the documents leave the sign of the mark open, so
                both are taken (fused_infer_attention_score, flash_attn in TN order).
        """
        lse = lse.reshape(out.shape[:2]).float()
        empty = lse.isinf()
        return cls._neutral(out, lse.masked_fill(empty, float("-inf")), empty)

    @classmethod
    def from_max_and_sum(
        cls, out: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor
    ) -> PartialAttention:
        """From an operator that reports softmax maximum and sum (sparse_flash_attention).

        KN key heads with N/KN query heads each stand in front of the tokens in the operator's
        statistics; rows of a batched query are flattened to T = B * S.

        Args:
            out: (T, N, D), or (B, S, N, D).
            maximum: (KN, T, N/KN), or (B, KN, S, N/KN), float32; meaningless where the sum is 0.
            total: Like maximum; 0 marks a row without keys.

        A sink is part of the sum: merging shards that each contain it would count it repeatedly.
        """
        maximum, total = (part.movedim(-3, -2) for part in (maximum, total))
        out = out.reshape(-1, *out.shape[-2:])
        maximum, total = (part.reshape(out.shape[:2]).float() for part in (maximum, total))
        empty = total == 0
        lse = (maximum + total.log()).masked_fill(empty, float("-inf"))
        return cls._neutral(out, lse, empty)

    @classmethod
    def empty(cls, tokens: int, heads: int, size: int, dtype: torch.dtype) -> PartialAttention:
        """The neutral element of :func:`merge_partials`."""
        out = torch.zeros(tokens, heads, size, dtype=dtype)
        return cls(out, torch.full((tokens, heads), float("-inf")))

    @classmethod
    def _neutral(
        cls, out: torch.Tensor, lse: torch.Tensor, empty: torch.Tensor
    ) -> PartialAttention:
        return cls(out.masked_fill(empty[..., None], 0.0), lse)


def merge_partials(parts: Sequence[PartialAttention]) -> PartialAttention:
    """Attention over the union of disjoint key sets.

    ``lse = ln sum_i exp(lse_i)`` and ``out = sum_i exp(lse_i - lse) out_i``, computed in float32;
    rows that no part has keys for stay out 0, lse -inf.

    Raises:
        ValueError: No parts, or parts of different shapes.
    """
    if not parts:
        raise ValueError("merge_partials: found no parts, allowed: at least one")
    shapes = {tuple(part.out.shape) for part in parts}
    if len(shapes) != 1:
        raise ValueError(f"merge_partials: found shapes {sorted(shapes)}, allowed: one shape")
    lses = torch.stack([part.lse for part in parts])
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse.masked_fill(lse.isneginf(), 0.0))
    out = sum(w[..., None] * part.out.float() for w, part in zip(weights, parts, strict=True))
    assert isinstance(out, torch.Tensor)  # noqa: S101 - parts is not empty
    return PartialAttention(out.to(parts[0].out.dtype), lse)
