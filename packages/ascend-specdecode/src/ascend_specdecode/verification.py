"""Exact verification of drafted tokens against the target."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ascend_specdecode.errors import ArgumentError

PAD_TOKEN: Final = -1
"""What verification writes where a request emits nothing."""

_INDEX_DTYPES: Final = (torch.int32, torch.int64)


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
    if draft_tokens.device.type == "cpu":
        _check_counts(num_draft_tokens, draft_tokens.shape[1])
    width = draft_tokens.shape[1]
    step = torch.arange(width + 1, device=draft_tokens.device)
    drafted = step[:width] < num_draft_tokens.unsqueeze(1)
    agrees = (draft_tokens == target_argmax[:, :width]) & drafted
    accepted = agrees.long().cumprod(dim=1).sum(dim=1)
    # The accepted prefix equals the target's choices, so the target's row holds both parts.
    emitted = step <= accepted.unsqueeze(1)
    if draft_tokens.device.type == "cpu":
        _check_target_tokens(target_argmax, emitted)
    return torch.where(emitted, target_argmax.long(), PAD_TOKEN)


def _check_layout(draft_tokens: Tensor, target_argmax: Tensor, num_draft_tokens: Tensor) -> None:
    """Check what can be known without reading a value."""
    if draft_tokens.dim() != 2:
        raise ArgumentError("draft_tokens", f"shape {list(draft_tokens.shape)}", "shape [B, K]")
    batch, width = draft_tokens.shape
    _check_shape("target_argmax", target_argmax, [batch, width + 1], "[B, K+1]")
    _check_shape("num_draft_tokens", num_draft_tokens, [batch], "[B]")
    named = {
        "draft_tokens": draft_tokens,
        "target_argmax": target_argmax,
        "num_draft_tokens": num_draft_tokens,
    }
    for name, tensor in named.items():
        if tensor.dtype not in _INDEX_DTYPES:
            raise ArgumentError(f"{name}.dtype", tensor.dtype, "torch.int64 or torch.int32")
        if tensor.device != draft_tokens.device:
            allowed = f"the device of draft_tokens ({draft_tokens.device})"
            raise ArgumentError(f"{name}.device", tensor.device, allowed)


def _check_shape(name: str, tensor: Tensor, shape: list[int], meaning: str) -> None:
    if list(tensor.shape) != shape:
        raise ArgumentError(name, f"shape {list(tensor.shape)}", f"shape {meaning} = {shape}")


def _check_counts(num_draft_tokens: Tensor, width: int) -> None:
    wrong = (num_draft_tokens < 0) | (num_draft_tokens > width)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        found = int(num_draft_tokens[first])
        raise ArgumentError(f"num_draft_tokens[{first}]", found, f"0..K (K = {width})")


def _check_target_tokens(target_argmax: Tensor, emitted: Tensor) -> None:
    wrong = emitted & (target_argmax < 0)
    if bool(wrong.any()):
        row, column = (int(index) for index in wrong.nonzero()[0])
        found = int(target_argmax[row, column])
        raise ArgumentError(f"target_argmax[{row}, {column}]", found, "token ids >= 0")
