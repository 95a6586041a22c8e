"""What drafters hold per sequence, and the parts of a sequence they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ascend_specdecode.sequences import SequenceOrigin, SequenceState

StateT = TypeVar("StateT")


class PerSequence(Generic[StateT]):
    """State of sequences, by id; of another sequence with the same id nothing is used.

    Args:
        make: makes the state of a sequence that was not seen before.
    """

    def __init__(self, make: Callable[[], StateT]) -> None:
        self._make = make
        self._held: dict[int, tuple[SequenceOrigin, StateT]] = {}

    def of(self, origin: SequenceOrigin) -> StateT:
        """Return the state of a sequence, made anew for one that was not seen before."""
        held = self._held.get(origin.sequence_id)
        if held is None or held[0] is not origin:
            return self.renew(origin)
        return held[1]

    def renew(self, origin: SequenceOrigin) -> StateT:
        """Return fresh state in the place of what was held."""
        state = self._make()
        self._held[origin.sequence_id] = (origin, state)
        return state

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence, known or not."""
        self._held.pop(sequence_id, None)

    @property
    def sequence_ids(self) -> frozenset[int]:
        """The sequences that something is held for."""
        return frozenset(self._held)


def tokens_between(sequence: SequenceState, start: int, end: int) -> NDArray[np.int64]:
    """Return tokens ``start``..``end``, assumed ones included, without copying the context."""
    verified = sequence.origin.buffer.view(min(start, sequence.length), min(end, sequence.length))
    if end <= sequence.length:
        return verified
    assumed = sequence.assumed[max(start - sequence.length, 0) : end - sequence.length]
    return np.concatenate([verified, np.array(assumed, dtype=np.int64)])
