"""Rotation of index queries and keys, in the two styles that models use."""

from __future__ import annotations

import enum

import torch

import ascend_attn_ops  # noqa: F401  registers torch.ops.ascend_attn

from ..errors import InvalidFieldError


class IndexRope(enum.Enum):
    """Which elements of the rotary part form a pair.

    ``HALF``: elements i and i + 32 (DeepSeek-V3.2). ``INTERLEAVED``: elements 2i and 2i + 1
    (GLM-5); the result is in half order, as that model has it. Main attention of both families
    is interleaved, so that the style of the indexer cannot be taken from it.
    """

    HALF = "half"
    INTERLEAVED = "interleaved"


def rotate_index_rows(
    rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: IndexRope
) -> torch.Tensor:
    """Rotate the leading elements of index rows; the others pass through.

    Args:
        rows: ``[T, num_heads, size]`` index queries, or keys with one head.
        cos: ``[T, rope_size]`` with both halves equal; rope_size is at most size.
        sin: As ``cos``.
        style: Which elements form a pair.

    Returns:
        A new tensor, shape and dtype of ``rows``.

    Raises:
        InvalidFieldError: A shape does not fit.
        ascend_attn_ops.OpArgumentError: The interleaved operator takes a rope_size of 64 only.
    """
    size = cos.shape[-1]
    if rows.dim() != 3 or cos.shape != (rows.shape[0], size) or size > rows.shape[2]:
        raise InvalidFieldError(
            "rows, cos", [list(rows.shape), list(cos.shape)], "[T, N, size], [T, at most size]"
        )
    if rows.shape[0] == 0:
        return rows.clone()
    turn = _half if style is IndexRope.HALF else _interleaved
    rotated = turn(rows[..., :size], cos.to(rows.dtype), sin.to(rows.dtype))
    return torch.cat([rotated, rows[..., size:]], -1)


def _half(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotated: torch.Tensor = torch.ops.ascend_attn.rotary_position_embedding(
        rows.contiguous(), cos[:, None].contiguous(), sin[:, None].contiguous(), "half"
    )
    return rotated


def _interleaved(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The operator takes (B, N, S, 64): here every token is a batch of its own with S = 1."""
    rotated: torch.Tensor = torch.ops.ascend_attn.interleave_rope(
        rows[:, :, None].contiguous(),
        cos[:, None, None].contiguous(),
        sin[:, None, None].contiguous(),
    )
    return rotated[:, :, 0]
