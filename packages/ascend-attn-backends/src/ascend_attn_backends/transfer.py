"""Copies that no later write to the source can change, and that never convert."""

from __future__ import annotations

import torch

from .errors import InvalidFieldError


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


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Write ``source`` into ``target`` in place, without a conversion.

    A copy that converts between dtypes on its way to a device is not asynchronous: the host waits
    for it in every step. So the dtypes must be equal; convert once, where the tensor is made.

    Args:
        target: Buffer that is written; its address stays.
        source: Same shape and dtype. From host memory to a device a private snapshot is copied, as
            :func:`copy_to_device` does.

    Raises:
        InvalidFieldError: Shape or dtype differ.
    """
    if (source.dtype, source.shape) != (target.dtype, target.shape):
        raise InvalidFieldError(
            "source",
            f"{source.dtype} {list(source.shape)}",
            f"{target.dtype} {list(target.shape)}, as the buffer it is copied into",
        )
    if source.device != target.device and source.device.type == "cpu":
        source = copy_to_device(source, target.device)
    target.copy_(source, non_blocking=True)
