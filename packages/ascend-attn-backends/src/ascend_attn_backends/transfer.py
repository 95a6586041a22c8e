"""Copies from the host to a device that no later write to the host buffer can change."""

from __future__ import annotations

import torch


def copy_to_device(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A device tensor with the values that ``host`` has now.

    An asynchronous copy reads its source when the stream reaches it, which may be after the caller
    has refilled a buffer that it keeps for all steps. The copy is therefore issued from a private
    snapshot that nobody else can write. Where the device has pinned host memory the snapshot is
    pinned, so the copy does not block; torch's caching host allocator keeps a pinned block alive
    until the copies that read it have run.

    Args:
        host: Tensor in host memory, any shape and dtype.
        device: Destination.

    Returns:
        A new tensor on ``device`` that shares memory with nothing, same shape and dtype.
    """
    device = torch.device(device)
    pinned = device.type not in ("cpu", "meta")
    snapshot = torch.empty(host.shape, dtype=host.dtype, pin_memory=pinned).copy_(host)
    return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(
        snapshot, non_blocking=True
    )
