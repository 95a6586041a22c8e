"""One captured decode step: its buffers, its recorded calls, and their renewal before a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import attrs
import torch

from ..batch import AttentionBatch
from ..errors import InvalidFieldError
from ..transfer import copy_into
from .buffers import DecodeBuffers


class GraphParam(Protocol):
    """A recorded attention call of one layer."""

    @property
    def layer(self) -> str:
        """Name of the layer."""

    def launch(self) -> None:
        """Issue the call with the values that the buffers have now."""


class GraphTasks(Protocol):
    """How an engine's graphs record a call, and renew its host arguments before a replay.

    On an NPU these are ``torch.npu.graph_task_group_begin`` and ``_end``, and
    ``graph_task_update_begin`` and ``_end``; :class:`HostGraph` is one for the CPU.
    """

    def capture(self, launch: Callable[[], None]) -> object:
        """Issue a call while a graph is captured; returns a handle of it."""

    def update(self, handle: object, launch: Callable[[], None]) -> None:
        """Give the recorded call the arguments with which ``launch`` issues it now."""


@attrs.frozen
class _Recorded:
    param: GraphParam
    handle: object


@attrs.frozen(eq=False)
class CapturedStep:
    """A decode step of one size. Made by :class:`GraphParams`.

    Frozen, as its buffers are: no attribute ever names another tensor.

    Attributes:
        role: ``"target"`` or ``"draft"``.
        size: Tokens T of the step, padding included.
        number: Which step of the draft it is, from 0; 0 for the target.
        buffers: Per group of layers, what its calls read.
        positions: ``[T]`` int64, for the rotary embedding; 0 for padding tokens.
    """

    role: str
    size: int
    number: int
    buffers: Mapping[str, DecodeBuffers]
    positions: torch.Tensor
    _recorded: dict[str, _Recorded] = attrs.field(factory=dict, init=False)
    _workspaces: list[torch.Tensor] = attrs.field(factory=list, init=False)

    @property
    def params(self) -> tuple[GraphParam, ...]:
        """The recorded calls, in the order of capture."""
        return tuple(entry.param for entry in self._recorded.values())

    def record(self, param: GraphParam, tasks: GraphTasks) -> None:
        """Capture a layer's call: issue it now, and know it again before each replay.

        Raises:
            InvalidFieldError: The layer was recorded before.
        """
        if param.layer in self._recorded:
            raise InvalidFieldError(
                "layer", param.layer, f"one call per layer in the {self.role} step of {self.size}"
            )
        self._recorded[param.layer] = _Recorded(param, tasks.capture(param.launch))

    def workspace(self, num_bytes: int) -> torch.Tensor:
        """uint8 scratch memory of at least ``num_bytes`` that the calls of this step share.

        A layer that needs more gets a larger one; those that earlier calls were captured with stay
        alive, because the graph holds their addresses.
        """
        for held in self._workspaces:
            if held.numel() >= num_bytes:
                return held
        grown = torch.empty(num_bytes, dtype=torch.uint8, device=self.positions.device)
        self._workspaces.append(grown)
        return grown

    def refresh(
        self, batches: AttentionBatch | Mapping[str, AttentionBatch], positions: torch.Tensor
    ) -> None:
        """Write a step into the buffers of every group, in place.

        Args:
            batches: The step as each group of layers sees it, or one batch for the only group.
            positions: ``[num_tokens]`` int64.

        Raises:
            InvalidFieldError: A group has no batch, there is a batch without a group, or there are
                more positions than tokens. Nothing is written then.
            AttentionBatchError: A batch does not fit; see :meth:`DecodeBuffers.check`. Nothing is
                written then.
        """
        if isinstance(batches, AttentionBatch):
            batches = dict.fromkeys(self.buffers, batches) if len(self.buffers) == 1 else {}
        if set(batches) != set(self.buffers):
            raise InvalidFieldError(
                "batches", sorted(batches), f"one for each group: {sorted(self.buffers)}"
            )
        tokens = positions.shape[0]
        for name, batch in batches.items():
            self.buffers[name].check(batch)
            if batch.num_tokens != tokens:
                allowed = f"the {batch.num_tokens} tokens of group {name!r}"
                raise InvalidFieldError("positions", f"{tokens} positions", allowed)
        for name, batch in batches.items():
            self.buffers[name].fill(batch)
        copy_into(self.positions[:tokens], positions)
        self.positions[tokens:].zero_()

    def clear(self) -> None:
        """Make the whole step padding, for idle runs and warm-up: nothing of a request is left."""
        for buffers in self.buffers.values():
            buffers.clear()
        self.positions.zero_()

    def update(self, tasks: GraphTasks) -> None:
        """Renew the host arguments of every recorded call, between :meth:`refresh` and replay."""
        for entry in self._recorded.values():
            tasks.update(entry.handle, entry.param.launch)
