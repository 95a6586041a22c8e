"""Exact verification of drafted tokens against the target."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.tensors import check_indices, check_range, check_shape

PAD_TOKEN: Final = -1
"""What verification writes where a request emits nothing."""


def verify_greedy(draft_tokens: Tensor, target_argmax: Tensor, num_draft_tokens: Tensor) -> Tensor:
    """Accept drafted tokens for as long as they are what the target would have chosen itself.

    Request b emits its longest drafted prefix that equals the target's choice, then one more token
    of the target: the token that replaces the first wrong draft, or the bonus token when all were
    right. The emitted tokens are therefore the target's own greedy stream (Leviathan et al. 2023,
    "Fast Inference from Transformers via Speculative Decoding", with temperature 0).

    Vectorised over requests; nothing is read back to the host when the tensors are on a device.

    Args:
        draft_tokens: [B, K] int64 (or int32); row b holds num_draft_tokens[b] drafted tokens, what
            follows them is ignored.
        target_argmax: [B, K+1] int64 (or int32); entry j is the target's choice after the context
            and the first j drafted tokens. Entries after num_draft_tokens[b] are ignored.
        num_draft_tokens: [B] int64 (or int32), each in 0..K.

    Returns:
        [B, K+1] int64: the emitted tokens of each request (at least one), then -1.

    Raises:
        ArgumentError: ranks, sizes, dtypes or devices disagree. For CPU tensors also: a count
            outside 0..K, or a negative target token that would be emitted. On other devices values
            are not read, since that would stop the host; a count then acts as if clamped to 0..K.
    """
    _check_layout(draft_tokens, target_argmax, num_draft_tokens)
    on_cpu = draft_tokens.device.type == "cpu"
    if on_cpu:
        check_counts(num_draft_tokens, draft_tokens.shape[1])
    width = draft_tokens.shape[1]
    accepted = count_leading(draft_tokens == target_argmax[:, :width], num_draft_tokens)
    # The accepted prefix equals the target's choices, so the target's row holds both parts.
    emitted = torch.arange(width + 1, device=draft_tokens.device) <= accepted.unsqueeze(1)
    if on_cpu:
        check_range("target_argmax", target_argmax, "token ids >= 0", used=emitted)
    return torch.where(emitted, target_argmax.long(), PAD_TOKEN)


def count_leading(accepts: Tensor, num_draft_tokens: Tensor) -> Tensor:
    """Return how many drafted tokens come before the first that is not accepted.

    Args:
        accepts: [B, K] bool, whether each token would be accepted.
        num_draft_tokens: [B] int, drafted tokens of each row.

    Returns:
        [B] int64.
    """
    step = torch.arange(accepts.shape[1], device=accepts.device)
    drafted = step < num_draft_tokens.unsqueeze(1)
    return (accepts & drafted).long().cumprod(dim=1).sum(dim=1)


def emit(draft_tokens: Tensor, accepted: Tensor, last: Tensor) -> Tensor:
    """Return the accepted tokens, then ``last``, then -1: [B, K+1] int64.

    Args:
        draft_tokens: [B, K] int.
        accepted: [B] int64, how many of them are accepted.
        last: [B] int64, the token after them.
    """
    step = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    padded = torch.nn.functional.pad(draft_tokens.long(), (0, 1))
    tokens = torch.where(step < accepted.unsqueeze(1), padded, PAD_TOKEN)
    return torch.where(step == accepted.unsqueeze(1), last.unsqueeze(1), tokens)


def _check_layout(draft_tokens: Tensor, target_argmax: Tensor, num_draft_tokens: Tensor) -> None:
    """Check what can be known without reading a value."""
    if draft_tokens.dim() != 2:
        raise ArgumentError("draft_tokens", f"shape {list(draft_tokens.shape)}", "shape [B, K]")
    batch, width = draft_tokens.shape
    check_shape("target_argmax", target_argmax, [batch, width + 1], "[B, K+1]")
    check_shape("num_draft_tokens", num_draft_tokens, [batch], "[B]")
    named = {
        "draft_tokens": draft_tokens,
        "target_argmax": target_argmax,
        "num_draft_tokens": num_draft_tokens,
    }
    check_indices(named, draft_tokens.device, "draft_tokens")


def check_counts(num_draft_tokens: Tensor, width: int) -> None:
    """Refuse a CPU tensor of counts [B] with one outside 0..width.

    Raises:
        ArgumentError: names the first such count.
    """
    check_range("num_draft_tokens", num_draft_tokens, f"0..K (K = {width})", most=width)
