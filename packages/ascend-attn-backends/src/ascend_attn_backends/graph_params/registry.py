"""The captured steps of a model, by size; those of target and draft are kept apart."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from ..batch import AttentionBatch
from ..errors import InvalidFieldError
from .buffers import CacheGroup, DecodeBuffers
from .sizes import CaptureSizes
from .step import CapturedStep

_ROLES = ("target", "draft")


class GraphParams:
    """The captured decode steps of one model.

    Steps of all sizes share one set of buffers, of which a smaller step reads the first rows; the
    steps of a draft each have a set of their own, so that preparing one never changes another.

    Args:
        role: ``"target"`` or ``"draft"``.
        sizes: Which sizes are captured.
        groups: Layout of the block tables of each group of layers.
        device: Where the buffers live.
        num_steps: Steps of a draft between two verifications; 1 for a target.

    Raises:
        InvalidFieldError: The role is unknown, there is no group, or a target has several steps.
    """

    def __init__(
        self,
        role: str,
        sizes: CaptureSizes,
        groups: Mapping[str, CacheGroup],
        device: torch.device | str = "cpu",
        num_steps: int = 1,
    ) -> None:
        if role not in _ROLES:
            raise InvalidFieldError("role", role, " or ".join(_ROLES))
        if not groups:
            raise InvalidFieldError("groups", "none", "at least one group of layers")
        if num_steps < 1 or (role == "target" and num_steps != 1):
            raise InvalidFieldError("num_steps", num_steps, "at least 1, and 1 for a target")
        self.role, self.sizes, self.num_steps = role, sizes, num_steps
        where, largest = torch.device(device), sizes.largest
        self._positions = [
            torch.zeros(largest, dtype=torch.int64, device=where) for _ in range(num_steps)
        ]
        self._buffers = [
            {
                name: DecodeBuffers.allocate(group, largest, sizes.query_len, where)
                for name, group in groups.items()
            }
            for _ in range(num_steps)
        ]
        self._steps: dict[tuple[int, int], CapturedStep] = {}

    def step(self, size: int, number: int = 0) -> CapturedStep:
        """The step of a captured size; the same object for every call.

        Args:
            size: Tokens of the step.
            number: Which step of the draft, from 0.

        Raises:
            InvalidFieldError: Not a captured size, or no such step.
        """
        self.sizes.require(size)
        if not 0 <= number < self.num_steps:
            raise InvalidFieldError("number", number, f"0 to {self.num_steps - 1}")
        known = self._steps.get((size, number))
        if known is None:
            buffers = {name: held.first(size) for name, held in self._buffers[number].items()}
            known = CapturedStep(self.role, size, number, buffers, self._positions[number][:size])
            self._steps[size, number] = known
        return known

    def prepare(
        self,
        batches: AttentionBatch | Mapping[str, AttentionBatch],
        positions: torch.Tensor,
        number: int = 0,
    ) -> CapturedStep:
        """The step that takes this batch, padded to the next captured size and refreshed.

        Args:
            batches: See :meth:`CapturedStep.refresh`.
            positions: ``[num_tokens]`` int64.
            number: Which step of the draft, from 0.

        Raises:
            InvalidFieldError: More tokens than the largest captured size.
            AttentionBatchError: A batch does not fit.
        """
        step = self.step(self.sizes.padded(positions.shape[0]), number)
        step.refresh(batches, positions)
        return step


@attrs.frozen(eq=False)
class GraphParamSets:
    """The captured steps of a target and of its draft: separate buffers, calls and workspaces.

    Attributes:
        target: Of the target.
        draft: Of the draft, or None where it runs eager or there is none.

    Raises:
        InvalidFieldError: A set has the role of the other one.
    """

    target: GraphParams
    draft: GraphParams | None = None

    def __attrs_post_init__(self) -> None:
        for role in _ROLES:
            found: GraphParams | None = getattr(self, role)
            if found is not None and found.role != role:
                raise InvalidFieldError(role, f"the set of a {found.role}", f"the set of a {role}")

    def of(self, role: str) -> GraphParams:
        """The set of a role.

        Raises:
            InvalidFieldError: There is none.
        """
        found: GraphParams | None = getattr(self, role) if role in _ROLES else None
        if found is None:
            captured = [name for name in _ROLES if getattr(self, name) is not None]
            raise InvalidFieldError("role", role, " or ".join(captured))
        return found
