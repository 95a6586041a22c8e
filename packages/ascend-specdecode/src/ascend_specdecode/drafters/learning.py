"""What drafters share that look up what a sequence said before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from ascend_specdecode.drafters.held import PerSequence, tokens_between
from ascend_specdecode.ngram import NgramMatch
from ascend_specdecode.protocols import NOTHING, Proposal
from ascend_specdecode.sequences import SequenceState

_LEARNED_AT_ONCE: Final = 8192
"""Tokens that are learned before others get their turn: a few milliseconds."""


class TextIndex(Protocol):
    """An index of one text that grows at its end."""

    def __len__(self) -> int:
        """Tokens learned."""
        ...

    def extend(self, tokens: NDArray[np.int64]) -> None:
        """Learn the next tokens."""
        ...

    def find(self, assumed: Sequence[int]) -> NgramMatch | None:
        """Find an earlier occurrence of the end of the learned text with ``assumed`` after it."""
        ...


IndexT = TypeVar("IndexT", bound=TextIndex)


class LookupDrafter(Generic[IndexT]):
    """Proposes what followed an earlier occurrence of a sequence's end.

    Each verified token is learned once, so the cost of a step does not grow with the context.

    Args:
        indices: the index of each sequence.
        min_match: shortest occurrence that counts, in tokens.
    """

    def __init__(self, indices: PerSequence[IndexT], min_match: int = 1) -> None:
        self._indices = indices
        self._min_match = min_match

    @property
    def sequence_ids(self) -> frozenset[int]:
        """The sequences that something is held for."""
        return self._indices.sequence_ids

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        """Propose up to ``k`` tokens after each sequence; nothing where nothing is found."""
        return [await self._propose(sequence, k) for sequence in sequences]

    def forget(self, sequence_id: int) -> None:
        """Drop what was learned of a sequence, known or not."""
        self._indices.forget(sequence_id)

    async def _propose(self, sequence: SequenceState, k: int) -> Proposal:
        index = self._indices.of(sequence.origin)
        if len(index) > sequence.length:  # an older state than the last one
            index = self._indices.renew(sequence.origin)
        while len(index) < sequence.length:
            end = min(len(index) + _LEARNED_AT_ONCE, sequence.length)
            index.extend(sequence.origin.buffer.view(len(index), end))
            if end < sequence.length:
                await anyio.lowlevel.checkpoint()
        match = index.find(sequence.assumed)
        if match is None or match.length < self._min_match:
            return NOTHING
        end = min(match.end + k, len(sequence))
        return Proposal(tuple(tokens_between(sequence, match.end, end).tolist()))
