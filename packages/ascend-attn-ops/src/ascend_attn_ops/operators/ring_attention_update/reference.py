"""The documented formula, in float32."""

from __future__ import annotations

import torch

from .arguments import RingAttentionUpdateArguments as Args


def host_gap(a: Args) -> str | None:
    """The order of softmax rows that no document gives."""
    if a.input_layout == "TND" and a.input_softmax_layout == "SBH":
        return "TND attention with SBH softmax rows: their order is not documented (unverified)"
    return None


def run_reference(a: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """attn_out, softmax_max and softmax_sum; see the argument record."""
    maximum = torch.maximum(a.prev_softmax_max, a.cur_softmax_max)
    prev = a.prev_softmax_sum * torch.exp(a.prev_softmax_max - maximum)
    cur = a.cur_softmax_sum * torch.exp(a.cur_softmax_max - maximum)
    total = prev + cur
    heads = total.shape[1]
    out = _rows(a, a.prev_attn_out, heads) * (prev / total)[..., :1]
    out = out + _rows(a, a.cur_attn_out, heads) * (cur / total)[..., :1]
    return _back(a, out).to(a.prev_attn_out.dtype), maximum, total


def _rows(a: Args, out: torch.Tensor, heads: int) -> torch.Tensor:
    """Attention in the order of the softmax rows: (B, N, S, D), or (T, N, D)."""
    if a.input_layout == "TND":
        return out.float()
    split: torch.Tensor = out.float().unflatten(2, (heads, out.shape[2] // heads))
    return split.permute(1, 2, 0, 3)


def _back(a: Args, rows: torch.Tensor) -> torch.Tensor:
    if a.input_layout == "TND":
        return rows
    return rows.permute(2, 0, 1, 3).flatten(2)
