"""Merging attention over parts of the keys."""

from __future__ import annotations

from typing import Any

import torch

from ..contracts import contract_check
from ..dispatch import kernel


@kernel("aclnnAttentionUpdate", check=contract_check("attention_update"))
def attention_update(a: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """By the log of the sum of exponentials; parts that are all empty give NaN, as CANN does."""
    lse = torch.stack(a.lse).double()
    top = lse.amax(0)
    total = top + (lse - top).exp().sum(0).log()
    shares = (lse - total).exp()
    out = (torch.stack(a.local_out).double() * shares[..., None]).sum(0)
    return out, total if a.update_type == 1 else None


def _heads_first(tensor: torch.Tensor, softmax: torch.Tensor, layout: str) -> torch.Tensor:
    """Softmax values (.., 8) in the shape of an output whose last dimension is a head's."""
    if layout == "SBH":  # output (S, B, N * D), softmax (B, N, S, 8)
        return softmax[..., 0].permute(2, 0, 1)
    return softmax[..., 0]  # output (T, N, D), softmax (T, N, 8)


@kernel("aclnnRingAttentionUpdateV2", check=contract_check("ring_attention_update"))
def ring_attention_update(a: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By maximum and sum of the softmax, each held eight times."""
    previous, current = a.prev_softmax_max.double(), a.cur_softmax_max.double()
    top = torch.maximum(previous, current)
    parts = (
        a.prev_softmax_sum.double() * (previous - top).exp(),
        a.cur_softmax_sum.double() * (current - top).exp(),
    )
    total = parts[0] + parts[1]
    out = torch.zeros(a.prev_attn_out.shape, dtype=torch.float64)
    for part, rows in zip(parts, (a.prev_attn_out, a.cur_attn_out), strict=True):
        share = _heads_first(rows, part / total, a.input_layout)
        grouped = rows.double().view(*share.shape, -1)
        out += (grouped * share[..., None]).view(out.shape)
    return out, top, total
