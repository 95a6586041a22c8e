"""Which keys each token of a step sees, computed on the device of the lengths."""

from __future__ import annotations

import attrs
import torch

from .batch import AttentionBatch
from .open_tokens import StepTokens
from .starts import repair_starts


@attrs.frozen(eq=False)
class TokenKeys:
    """The tokens of a step, each by itself. Nothing here was read from the device.

    Attributes:
        rows: ``[num_tokens]`` int64 request of each token.
        own: ``[num_tokens]`` int64 position of each token among the keys of its request.
        ends: ``[num_tokens]`` int64, the keys before it are seen where no window hides them; 0 for
            a token without keys, and for one that repaired starts give to no request.
    """

    rows: torch.Tensor
    own: torch.Tensor
    ends: torch.Tensor

    def of(self, tokens: StepTokens) -> TokenKeys:
        """Those of some tokens."""
        return TokenKeys(*map(tokens.gather, (self.rows, self.own, self.ends)))


def token_keys(
    batch: AttentionBatch,
    starts: torch.Tensor,
    keys: torch.Tensor,
    causal: bool | torch.Tensor,
) -> TokenKeys:
    """The keys of each token.

    Args:
        batch: For its counts.
        starts: ``[num_rows + 1]`` query starts.
        keys: ``[num_rows]`` keys, on the same device.
        causal: One value, or ``[num_rows]`` on the same device.
    """
    starts = repair_starts(starts[: batch.num_reqs + 1], batch.num_tokens).long()
    token = torch.arange(batch.num_tokens, device=starts.device)
    rows = torch.searchsorted(starts[1:], token, right=True).clamp(max=max(batch.num_reqs - 1, 0))
    whole = keys.long()[rows]
    own = whole - starts[1:][rows] + token
    ends = own + 1
    if isinstance(causal, torch.Tensor):
        ends = torch.where(causal[rows], ends, whole)
    elif not causal:
        ends = whole
    return TokenKeys(rows, own, torch.where(token < starts[-1], ends, 0).clamp(min=0))
