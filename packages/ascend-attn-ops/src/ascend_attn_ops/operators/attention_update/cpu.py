"""One pass over the parts without a float32 copy of all of them."""

from __future__ import annotations

import torch

from .arguments import AttentionUpdateArguments as Args


def run_cpu(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged output and lse; see the argument record.

    The weights are normalised once in float32 (a softmax over the parts), so that the outputs need
    one multiply-add each; rows that CANN answers with NaN come out NaN here as well.
    """
    lse = torch.stack(a.lse)
    weights = lse.softmax(0)
    out = a.local_out[0].float() * weights[0, :, None]
    for part, weight in zip(a.local_out[1:], weights[1:], strict=True):
        out.addcmul_(part.float(), weight[:, None])
    if not a.update_type:
        return out.to(a.local_out[0].dtype), torch.zeros_like(lse[0])
    return out.to(a.local_out[0].dtype), _log_sum(lse)


def _log_sum(lse: torch.Tensor) -> torch.Tensor:
    """ln sum exp over the parts; NaN (not an infinity) where no maximum is finite, as in CANN."""
    merged = lse.logsumexp(0)
    return merged.masked_fill(merged.isinf(), float("nan"))
