"""The collectives that context parallelism needs, over torch.distributed or none at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class DCPGroup(Protocol):
    """Ranks that share the keys of every request."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every rank, in the order of ranks; all have one shape."""

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send the i-th tensor to rank i; returns what every rank sent to this one."""


class SingleRankGroup:
    """A group of one rank: every collective returns what it was given."""

    rank, size = 0, 1

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor itself."""
        return [tensor]

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The one tensor."""
        return list(tensors)


def group_or_alone(group: DCPGroup | None) -> DCPGroup:
    """The group; for None the one of this rank alone."""
    return SingleRankGroup() if group is None else group


class TorchDCPGroup:
    """A group of torch.distributed processes.

    Args:
        process_group: The ranks; None means all processes.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every rank, in the order of ranks."""
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self._group)
        return gathered

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send the i-th tensor to rank i, in one collective."""
        sent = torch.stack(list(tensors))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return list(received)
