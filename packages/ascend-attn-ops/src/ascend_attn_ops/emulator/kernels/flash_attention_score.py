"""What torch's scaled_dot_product_attention calls: aclnnFlashAttentionScore, V4 on Ascend950."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..abi import NOT_EMULATED, AclnnError
from ..dispatch import kernel

_UNKNOWN = (
    "real_shift", "padding_mask", "drop_mask", "sink", "query_rope", "key_rope",
    "d_scale_q", "d_scale_k", "d_scale_v",
)  # fmt: skip


def _check(_name: str, a: Any) -> None:
    for name in _UNKNOWN:
        if getattr(a, name, None) is not None:
            raise AclnnError(NOT_EMULATED, f"{name} is not emulated")
    if a.input_layout != "BNSD" or a.keep_prob != 1.0:
        raise AclnnError(NOT_EMULATED, "only input_layout BNSD without dropout is emulated")


@kernel("aclnnFlashAttentionScore", "aclnnFlashAttentionScoreV4", check=_check, workspace=8192)
def flash_attention_score(a: Any) -> tuple[torch.Tensor | None, ...]:
    """Maximum and sum (B, N, S, 8), nothing, and out (B, N, S, D)."""
    group = a.query.shape[1] // a.key.shape[1]
    key, value = (t.double().repeat_interleave(group, 1) for t in (a.key, a.value))
    scores = a.query.double() @ key.transpose(-1, -2) * a.scale_value
    if a.atten_mask is not None:
        scores = scores.masked_fill(_hidden(a, scores.shape), -math.inf)
    top = scores.amax(-1, keepdim=True)
    parts = (scores - top).exp().nan_to_num(0.0)
    total = parts.sum(-1, keepdim=True)
    eight = (*total.shape[:-1], 8)
    out = parts @ value / total.masked_fill(total == 0, 1.0)
    return top.expand(eight), total.expand(eight), None, out


def _hidden(a: Any, shape: torch.Size) -> torch.Tensor:
    """Mode 2 is causal from the top left, 3 from the bottom right; both pass a template."""
    rows, keys = shape[-2:]
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    if a.sparse_mode in (2, 3):
        return j > i + (keys - rows if a.sparse_mode == 3 else 0)
    mask: torch.Tensor = a.atten_mask.bool()
    return mask.expand(shape)
