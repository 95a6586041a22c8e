"""Which block of which layer lies where in a pool of fixed size."""

from __future__ import annotations

import torch

from ..errors import AttentionBackendError, InvalidFieldError


class OffloadCapacityError(AttentionBackendError, RuntimeError):
    """One token chose keys from more blocks than the pool holds.

    Attributes:
        needed: Blocks that are needed together.
        capacity: Blocks that the pool holds.
    """

    def __init__(self, needed: int, capacity: int) -> None:
        self.needed, self.capacity = needed, capacity
        super().__init__(
            f"capacity_blocks: found {capacity}; allowed: at least {needed}, "
            "the blocks that one token chose keys from"
        )


class BlockPlaces:
    """Bookkeeping of the pool: places, least recent use, pins. Holds no keys and copies nothing.

    Args:
        num_layers: Layers that share the pool.
        num_blocks: Fetch blocks of each layer.
        capacity: Places.

    Raises:
        InvalidFieldError: No places.
    """

    def __init__(self, num_layers: int, num_blocks: int, capacity: int) -> None:
        if capacity < 1:
            raise InvalidFieldError("capacity_blocks", capacity, "at least 1")
        self.capacity = capacity
        self.evictions = 0
        self._slot_of = torch.full((num_layers, num_blocks), -1, dtype=torch.int64)
        self._owner = torch.full((capacity,), -1, dtype=torch.int64)
        self._used = torch.full((capacity,), -1, dtype=torch.int64)
        self._pins = torch.zeros(capacity, dtype=torch.int64)
        self._clock = 0

    def slots(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """``[n]`` int64 places of the blocks of a layer, -1 for those that are not in the pool."""
        return self._slot_of[layer, blocks]

    @property
    def num_free(self) -> int:
        """Places that may be taken: not pinned."""
        return int((self._pins == 0).sum())

    def touch(self, slots: torch.Tensor) -> None:
        """Mark places as used now."""
        self._clock += 1
        self._used[slots] = self._clock

    def pin(self, slots: torch.Tensor) -> None:
        """Protect places from being taken, once more."""
        self._pins[slots] += 1

    def unpin(self, slots: torch.Tensor) -> None:
        """Undo one :meth:`pin`."""
        self._pins[slots] -= 1

    def place(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Give blocks that are not in the pool the places that were unused for longest.

        Args:
            layer: Whose blocks.
            blocks: ``[n]`` int64, different ones, n at most :attr:`num_free`.

        Returns:
            ``[n]`` int64 places, pinned once; the caller copies the keys.
        """
        age = self._used.masked_fill(self._pins > 0, torch.iinfo(torch.int64).max)
        slots = age.argsort(stable=True)[: len(blocks)]
        owners = self._owner[slots]
        gone = owners[owners >= 0]
        self.evictions += len(gone)
        self._slot_of.view(-1)[gone] = -1
        self._owner[slots] = layer * self._slot_of.shape[1] + blocks
        self._slot_of[layer, blocks] = slots
        self.pin(slots)
        self.touch(slots)
        return slots

    def forget(self, slots: torch.Tensor) -> None:
        """Empty places whose copy failed, and undo one pin of each."""
        owners = self._owner[slots]
        self._slot_of.view(-1)[owners] = -1
        self._owner[slots] = -1
        self._used[slots] = -1
        self.unpin(slots)
