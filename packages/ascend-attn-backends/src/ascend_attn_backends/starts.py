"""Repair of query starts, for callers whose padding rows carry stale or negative values."""

from __future__ import annotations

import torch


def repair_starts(query_start_loc: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Query starts that are monotone and inside the step.

    Every start is clamped to ``[0, num_tokens]`` and then replaced by the cumulative maximum, so a
    row with a stale, repeated or negative start becomes a row of length zero and the rows before
    it keep their tokens: ``[0, 3, 3, -1, 7]`` with 7 tokens gives ``[0, 3, 3, 3, 7]``. Starts that
    are already right come back unchanged. The input is never written and nothing is read back to
    the host.

    Args:
        query_start_loc: ``[num_rows + 1]`` int32 or int64, on any device.
        num_tokens: Number of query tokens T of the step.

    Returns:
        ``[num_rows + 1]``, dtype and device of the input.
    """
    return torch.cummax(query_start_loc.clamp(min=0, max=num_tokens), dim=0).values


def repaired_on_host(query_start_loc: torch.Tensor, num_tokens: int) -> list[int]:
    """What :func:`repair_starts` makes of starts in host memory, as integers."""
    starts: list[int] = query_start_loc.tolist()
    if starts[0] >= 0 and starts[-1] <= num_tokens and starts == sorted(starts):
        return starts
    repaired: list[int] = repair_starts(query_start_loc, num_tokens).tolist()
    return repaired
