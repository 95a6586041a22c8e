"""Which sequence a row of vLLM's batch is, step after step.

vLLM tells a custom drafter no request ids, and moves rows when requests end. A row is recognised by
its tokens: it continues a sequence whose tokens are what the row held before this step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from ascend_specdecode import SequenceOrigin, SequenceState, TokenBuffer

if TYPE_CHECKING:
    import numpy.typing as npt

KEPT_STEPS: Final = 16
"""Steps without a row after which a sequence is forgotten; vLLM may pause a request for a few."""


@attrs.frozen
class Prediction:
    """What a drafter thinks follows the first `base` tokens of a sequence."""

    base: int
    tokens: tuple[int, ...]

    def rest(self, state: SequenceState) -> tuple[int, ...]:
        """What is left of it after the tokens that `state` has gained; nothing if it erred."""
        gained = state.since(self.base).tolist()
        return self.tokens[len(gained) :] if list(self.tokens[: len(gained)]) == gained else ()


@attrs.define(eq=False)
class FollowedSequence:
    """A sequence of the batch.

    Attributes:
        state: its tokens.
        row: its row when it was last seen.
        sampled: tokens that the last step gave it.
        is_new: whether the last step was the first one with it.
        given: drafted tokens that were handed to vLLM for the step that runs.
        prediction: what is thought to follow.
        absent: steps since it had a row.
    """

    state: SequenceState
    row: int
    sampled: int
    is_new: bool = True
    given: int = 0
    prediction: Prediction | None = None
    absent: int = 0

    @property
    def rest(self) -> tuple[int, ...]:
        """Drafted tokens that still hold."""
        return () if self.prediction is None else self.prediction.rest(self.state)


class FollowedSequences:
    """The sequences of a batch, recognised by their tokens."""

    def __init__(self) -> None:
        self._followed: list[FollowedSequence] = []
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._followed)

    def follow(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
    ) -> tuple[list[FollowedSequence | None], list[int]]:
        """Find or begin the sequence of each row; the arguments are those of `propose`.

        Returns:
            Per row its sequence, None while its prompt is being computed; and the ids of sequences
            that are gone.
        """
        free: dict[int, list[FollowedSequence]] = {}
        for one in self._followed:
            free.setdefault(one.state.length, []).append(one)
        found: list[FollowedSequence | None] = []
        for row, sampled in enumerate(sampled_token_ids):
            tokens = token_ids_cpu[row, : int(num_tokens_no_spec[row])]
            found.append(self._take(free, row, tokens, len(sampled)) if sampled else None)
        return found, self._drop_absent(found)

    def _take(
        self,
        free: dict[int, list[FollowedSequence]],
        row: int,
        tokens: npt.NDArray[np.int32],
        sampled: int,
    ) -> FollowedSequence:
        before = len(tokens) - sampled
        candidates = free.get(before, [])
        for one in sorted(candidates, key=lambda one: one.row != row):
            if np.array_equal(one.state.verified, tokens[:before]):
                candidates.remove(one)
                origin = one.state.origin
                origin.buffer.append(tokens[before:].tolist())
                one.state = SequenceState(origin, len(tokens))
                one.row, one.sampled, one.is_new = row, sampled, False
                return one
        return self._begin(row, tokens, sampled)

    def _begin(self, row: int, tokens: npt.NDArray[np.int32], sampled: int) -> FollowedSequence:
        origin = SequenceOrigin(self._next_id, TokenBuffer(tokens), len(tokens) - sampled)
        self._next_id += 1
        begun = FollowedSequence(SequenceState(origin, len(tokens)), row, sampled)
        self._followed.append(begun)
        return begun

    def _drop_absent(self, found: Sequence[FollowedSequence | None]) -> list[int]:
        present = {id(one) for one in found}
        for one in self._followed:
            one.absent = 0 if id(one) in present else one.absent + 1
        gone = [one.state.sequence_id for one in self._followed if one.absent > KEPT_STEPS]
        self._followed = [one for one in self._followed if one.absent <= KEPT_STEPS]
        return gone
