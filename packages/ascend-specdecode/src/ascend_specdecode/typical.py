"""Typical acceptance: accepts what the target finds plausible. NOT exact; strictly opt-in.

Rule (Cai et al. 2024, Medusa, section 2.3.2): drafted token x is accepted when

    p(x) > min(epsilon, delta * exp(-H(p)))

with H the entropy of the target's distribution p: what is improbable is rejected where the target
is sure, and accepted where it is not. More drafted tokens are accepted than by rejection sampling,
and the output no longer has the target's distribution: compare results with care, and use
:func:`~ascend_specdecode.rejection_sample` wherever quality was measured on the target itself.
"""

from __future__ import annotations

from typing import Literal

import attrs
import torch
from torch import Tensor

from ascend_specdecode.arguments import check_number
from ascend_specdecode.choices import inverse_cdf
from ascend_specdecode.random_streams import Purpose, uniforms
from ascend_specdecode.rejection import check_step, draft_counts, request_streams
from ascend_specdecode.verification import count_leading, emit


@attrs.frozen(eq=False)
class InexactVerification:
    """What a method that does not keep the target's distribution emitted.

    Attributes:
        tokens: [B, K+1] int64, the emitted tokens of each request, then -1.
        exact: False: the tokens are not distributed as the target's own.
    """

    tokens: Tensor
    exact: Literal[False] = False


@torch.no_grad()
def typical_acceptance_inexact(
    draft_tokens: Tensor,
    target_probs: Tensor,
    *,
    num_draft_tokens: Tensor | None = None,
    epsilon: float = 0.09,
    delta: float = 0.3,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> InexactVerification:
    """Accept drafted tokens that are typical of the target; NOT exact (see the module).

    Request b emits its accepted drafted tokens and then one token sampled from the target.

    Args:
        draft_tokens: [B, K] int64 (or int32), as in :func:`rejection_sample`.
        target_probs: [B, K+1, V] float32 (or float64).
        num_draft_tokens: [B] int64 (or int32), each in 0..K; None is K.
        epsilon: in 0..1, the probability that always suffices.
        delta: >= 0, share of exp(-entropy) that suffices.
        seeds: [B] int64; None draws them.
        positions: [B] int64, tokens in each sequence before this step; None is 0.

    Returns:
        The tokens, marked as not exact.

    Raises:
        ArgumentError: as :func:`rejection_sample`, or a threshold is out of range.
    """
    check_number("epsilon", epsilon, "a number in 0..1", least=0.0, most=1.0)
    check_number("delta", delta, "a number >= 0", least=0.0, most=float("inf"))
    counts = draft_counts(draft_tokens, num_draft_tokens)
    check_step(draft_tokens, target_probs, None, counts)
    seeds, positions = request_streams(draft_tokens, seeds, positions)
    width = draft_tokens.shape[1]
    entropy = -torch.special.xlogy(target_probs, target_probs).sum(dim=-1)
    limit = (delta * torch.exp(-entropy)).clamp(max=epsilon)[:, :width]
    index = draft_tokens.long().clamp(0, target_probs.shape[2] - 1).unsqueeze(2)
    typical = target_probs[:, :width].gather(2, index).squeeze(2) > limit
    accepted = count_leading(typical, counts)
    rows = torch.arange(len(accepted), device=draft_tokens.device)
    numbers = uniforms(seeds, positions + accepted, Purpose.CHOOSE)
    last = inverse_cdf(target_probs[rows, accepted], numbers)
    return InexactVerification(emit(draft_tokens, accepted, last))
