"""The target's hidden states of verified positions, kept until a draft model has read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_specdecode.drafted_paths import kept
from ascend_specdecode.drafters.held import PerSequence
from ascend_specdecode.drafters.models import DraftInput
from ascend_specdecode.errors import ArgumentError, DrafterError
from ascend_specdecode.protocols import DraftedSequence, Scores
from ascend_specdecode.sequences import SequenceState

_MOST_UNREAD: Final = 64
"""Positions whose states are kept, for a model that is not asked to draft, before it reads them."""


@attrs.define(eq=False)
class Observed:
    """What was observed of one sequence.

    Attributes:
        hidden: [n, H], the target's states of positions ``first`` .. ``first + n - 1``.
        first: position of the first of them; at most the last one that the draft model has read,
            so that its output there can be computed again.
        computed: positions that the draft model has read.
        has_gap: whether states of positions before the last ones were left out.
    """

    hidden: Tensor | None = None
    first: int = 0
    computed: int = 0
    has_gap: bool = False

    @property
    def end(self) -> int:
        """The position after the last one that was observed."""
        return self.first + (0 if self.hidden is None else len(self.hidden))

    def covers(self, length: int) -> bool:
        """Whether a sequence of ``length`` tokens can be drafted: all but its last are known."""
        return length >= 2 and self.first <= length - 2 and self.end >= length - 1

    def add(self, hidden: Tensor, start: int) -> None:
        """Add states of positions from ``start`` on; known ones again change nothing.

        States after a gap are of no use, since a draft model reads every position.
        """
        known = self.end - start
        self.has_gap = known < 0
        if self.has_gap or known >= len(hidden):
            return
        new = hidden[known:].detach()
        # A copy: the target may write its next step over the tensor.
        self.hidden = new.clone() if self.hidden is None else torch.cat([self.hidden, new])

    def unread(self, sequence: SequenceState, length: int) -> DraftInput:
        """Return positions that the model has not read, at least the last before ``length - 1``.

        The tokens are shifted left by one against the hidden states.
        """
        assert self.hidden is not None  # noqa: S101 - the caller has looked
        start = min(self.computed, length - 2)
        tokens = sequence.origin.buffer.view(start + 1, length)
        hidden = self.hidden[start - self.first : length - 1 - self.first]
        return DraftInput(sequence.sequence_id, start, tokens, hidden)

    def read(self, end: int) -> None:
        """Note that the model has read the positions before ``end``."""
        self.computed = end
        if self.hidden is not None and end - 1 > self.first:
            self.hidden = self.hidden[end - 1 - self.first :].clone()
            self.first = end - 1


class HiddenStates:
    """The hidden states of every sequence, as a drafter observes them.

    Args:
        max_positions: positions that the draft model reads; of longer sequences no states are kept.
            None for no limit.
    """

    def __init__(self, max_positions: int | None = None) -> None:
        self._max_positions = max_positions
        self._observed = PerSequence(Observed)

    @property
    def sequence_ids(self) -> frozenset[int]:
        """The sequences that something is held for."""
        return self._observed.sequence_ids

    def of(self, sequence: SequenceState) -> Observed:
        """Return what was observed of a sequence."""
        return self._observed.of(sequence.origin)

    def forget(self, sequence_id: int) -> None:
        """Drop what is held for a sequence, known or not."""
        self._observed.forget(sequence_id)

    def add(
        self, batch: Sequence[DraftedSequence], scores: Scores, emitted: Sequence[Sequence[int]]
    ) -> None:
        """Keep the states of positions that are verified now: those of rejected tokens are not.

        Raises:
            ArgumentError: the target returned no hidden states, or too few for a row.
        """
        if scores.hidden_states is None:
            allowed = "one [N, H] tensor per row: this drafter reads the target's hidden states"
            raise ArgumentError("hidden_states", None, allowed)
        for row, hidden, tokens in zip(batch, scores.hidden_states, emitted, strict=True):
            start = row.cached_length
            # The last emitted token was not computed yet; of a tree the first path counts.
            count = row.sequence.length - start + (kept(row.proposal, tokens) if tokens else 0)
            if hidden.dim() != 2 or len(hidden) < count:
                name = f"hidden_states of sequence {row.sequence.sequence_id}"
                found, allowed = f"shape {list(hidden.shape)}", f"[N, H] with N >= {count}"
                raise ArgumentError(name, found, allowed)
            observed = self.of(row.sequence)
            observed.add(hidden[:count], start)
            if self._max_positions is not None and observed.end > self._max_positions:
                observed.read(observed.end)

    def due(self, batch: Sequence[DraftedSequence]) -> list[tuple[Observed, DraftInput]]:
        """Return what a model should read now so that few states are kept.

        That is parts of prompts, and sequences that were not drafted for a while. The caller lets
        the model read the inputs and then calls :meth:`Observed.read` with their ends.
        """
        found = []
        for row in batch:
            observed, end = self.of(row.sequence), row.sequence.length - 1
            unread = min(end, observed.end) - observed.computed
            if unread > (_MOST_UNREAD if row.needs_scores else 0) and end <= observed.end:
                found.append((observed, observed.unread(row.sequence, end + 1)))
        return found

    def ready(self, sequence: SequenceState) -> bool:
        """Whether a sequence can be drafted; not before the target has scored its prompt."""
        return self.of(sequence).covers(sequence.length)

    def refuse_gaps(self, sequences: Sequence[SequenceState]) -> None:
        """Refuse sequences of which some positions were left out, for example by a prefix cache.

        Raises:
            DrafterError: names them.
        """
        blind = [one.sequence_id for one in sequences if self.of(one).has_gap]
        if blind:
            raise DrafterError("the target gave no hidden states of some positions", blind)
