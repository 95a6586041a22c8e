"""Reuse of one choice of keys by several layers: groups of layers, and the buffer they share."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ..errors import AttentionBackendError, InvalidFieldError
from ..paged_step import check_shape


class StaleSelectionError(AttentionBackendError, RuntimeError):
    """A layer reads a choice of keys that is not the one of its group in this step.

    Attributes:
        layer: The layer that reads.
        written_by: The layer whose choice the buffer holds, or None in a step without one.
    """

    def __init__(self, layer: int, leader: int, written_by: int | None) -> None:
        self.layer, self.written_by = layer, written_by
        found = "no choice in this step" if written_by is None else f"that of layer {written_by}"
        super().__init__(
            f"top-k buffer read by layer {layer}: found {found}; "
            f"allowed: the choice of layer {leader}, made in this step"
        )


@attrs.frozen
class IndexGroup:
    """Layers that attend to the same keys.

    Attributes:
        leader: The layer whose indexer chooses.
        layers: All layers of the group in order, the leader first.
    """

    leader: int
    layers: tuple[int, ...]

    def next_layer(self, layer: int) -> int | None:
        """The layer of the group after ``layer``, or None after the last.

        Raises:
            InvalidFieldError: The layer is not in the group.
        """
        if layer not in self.layers:
            raise InvalidFieldError("layer", layer, f"one of {list(self.layers)}")
        later = [other for other in self.layers if other > layer]
        return later[0] if later else None


def index_groups(indexer_types: Sequence[str]) -> tuple[IndexGroup, ...]:
    """Groups from a model's configuration (``indexer_types`` of GLM-5).

    Args:
        indexer_types: Per layer ``"full"`` (it has an indexer) or ``"shared"`` (it reuses the
            choice of the last full layer before it).

    Raises:
        InvalidFieldError: Another word, or a shared first layer.
    """
    groups: list[list[int]] = []
    for layer, kind in enumerate(indexer_types):
        if kind not in ("full", "shared") or (kind == "shared" and not groups):
            allowed = "full or shared" if groups else "full, because no layer before it chooses"
            raise InvalidFieldError(f"indexer_types[{layer}]", repr(kind), allowed)
        if kind == "full":
            groups.append([])
        groups[-1].append(layer)
    return tuple(IndexGroup(group[0], tuple(group)) for group in groups)


class TopKBuffer:
    """The choice of keys that layers share within a step. Mutable; its memory never moves.

    A captured graph may keep the address of :attr:`indices`. Rows that a step does not write are
    -1, whatever an earlier, longer step left there: a token without a choice attends to nothing.

    Args:
        max_tokens: Most tokens of a step.
        top_k: Keys per token.
        device: Where the buffer lives.

    Raises:
        InvalidFieldError: A count is not positive.
    """

    def __init__(self, max_tokens: int, top_k: int, device: torch.device | str = "cpu") -> None:
        for name, value in (("max_tokens", max_tokens), ("top_k", top_k)):
            if value < 1:
                raise InvalidFieldError(name, value, "at least 1")
        self.indices = torch.full((max_tokens, 1, top_k), -1, dtype=torch.int32, device=device)
        self._written_by: int | None = None

    def begin_step(self) -> None:
        """Forget the last step: every row is -1 and no layer may read before a leader writes."""
        self.indices.fill_(-1)
        self._written_by = None

    def write(self, group: IndexGroup, topk_indices: torch.Tensor) -> None:
        """Store the choice of a group's leader.

        Args:
            group: Whose choice it is.
            topk_indices: ``[T, 1, k]`` int32 with k at most top_k.

        Raises:
            InvalidFieldError: More rows or entries than the buffer has.
        """
        rows, width = topk_indices.shape[0], topk_indices.shape[-1]
        check_shape("topk_indices", topk_indices, 0, 1, None)
        if rows > self.indices.shape[0] or width > self.indices.shape[2]:
            raise InvalidFieldError(
                "topk_indices", list(topk_indices.shape), f"at most {list(self.indices.shape)}"
            )
        self.indices[:rows, :, :width] = topk_indices
        self.indices[:rows, :, width:].fill_(-1)
        self.indices[rows:].fill_(-1)
        self._written_by = group.leader

    def read(self, group: IndexGroup, layer: int, num_tokens: int) -> torch.Tensor:
        """``[num_tokens, 1, top_k]`` view of the choice for a layer of the group.

        Raises:
            StaleSelectionError: The buffer holds another group's choice, or none of this step.
            InvalidFieldError: The layer is not in the group, or more tokens than the buffer has.
        """
        if layer not in group.layers:
            raise InvalidFieldError("layer", layer, f"one of {list(group.layers)}")
        if self._written_by != group.leader:
            raise StaleSelectionError(layer, group.leader, self._written_by)
        if not 0 <= num_tokens <= self.indices.shape[0]:
            raise InvalidFieldError("num_tokens", num_tokens, f"0 to {self.indices.shape[0]}")
        return self.indices[:num_tokens]
