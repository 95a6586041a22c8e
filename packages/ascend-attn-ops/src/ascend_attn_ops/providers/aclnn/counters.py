"""What a runtime holds and has done, counted."""

from __future__ import annotations

from collections import Counter

import attrs


@attrs.define
class Counters:
    """Public counters of a :class:`Runtime`.

    Attributes:
        calls: Operators that were launched.
        refused: First stages that returned an error.
        allocations: Blocks of device memory taken, workspaces included.
        frees: Blocks given back.
        live_bytes: Bytes of device memory held now.
        workspace_allocations: Times that the workspace was made, or made larger.
        workspace_reuses: Launches that found a workspace large enough.
        synchronisations: Times that the host waited for the stream.
        created: Handles made, by kind (``Tensor``, ``TensorList``, ``Scalar``, ``IntArray`` ...).
        destroyed: Handles given back, by kind.
    """

    calls: int = 0
    refused: int = 0
    allocations: int = 0
    frees: int = 0
    live_bytes: int = 0
    workspace_allocations: int = 0
    workspace_reuses: int = 0
    synchronisations: int = 0
    created: Counter[str] = attrs.field(factory=Counter)
    destroyed: Counter[str] = attrs.field(factory=Counter)

    @property
    def live_handles(self) -> dict[str, int]:
        """Handles that exist now, by kind; empty when none does."""
        return dict(self.created - self.destroyed)

    @property
    def live_allocations(self) -> int:
        """Blocks of device memory held now."""
        return self.allocations - self.frees
