"""The documented formula."""

from __future__ import annotations

import torch

from .arguments import AttentionUpdateArguments as Args


def run_reference(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged output and lse; see the argument record."""
    lse = torch.stack(a.lse)
    maximum = lse.amax(0)
    merged = maximum + torch.log(torch.exp(lse - maximum).sum(0))
    out = torch.zeros_like(a.local_out[0], dtype=torch.float32)
    for part, part_lse in zip(a.local_out, lse, strict=True):
        out += part.float() * torch.exp(part_lse - merged)[:, None]
    return out.to(a.local_out[0].dtype), merged if a.update_type else torch.zeros_like(merged)
