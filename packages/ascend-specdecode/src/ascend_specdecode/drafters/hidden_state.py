"""Drafting with a layer on top of the target's hidden states: MTP, EAGLE.

The layer computes position p from the target's hidden state at p and the token at p + 1, and
predicts the token at p + 2. After the last verified position it goes on with its own hidden states
and its own tokens. State that it made from its own hidden states is overwritten with the next
call, which has the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from torch import Tensor

from ascend_specdecode.arguments import check_integer
from ascend_specdecode.drafters.draft_model import check_logits, drafts_that_fit
from ascend_specdecode.drafters.draws import DraftDraws, as_proposal
from ascend_specdecode.drafters.models import DraftInput, HiddenStateModel
from ascend_specdecode.drafters.observed import HiddenStates, Observed
from ascend_specdecode.protocols import DraftedSequence, Proposal, Scores
from ascend_specdecode.sequences import SequenceState


@attrs.define(eq=False)
class _Draft:
    """One sequence of a call.

    Attributes:
        sequence: the sequence.
        observed: the target's hidden states of it.
        room: tokens to draft.
        hidden: [H], the layer's own hidden state at the last computed position.
        follow: tokens after the verified ones, assumed or drafted, that were decided.
        drawn: the drafted ones of them.
    """

    sequence: SequenceState
    observed: Observed
    room: int
    hidden: Tensor | None = None
    follow: list[int] = attrs.field(factory=list)
    drawn: list[tuple[int, Tensor | None]] = attrs.field(factory=list)

    @property
    def done(self) -> bool:
        """Whether nothing is left to draft."""
        return len(self.drawn) >= self.room

    @property
    def assumes(self) -> bool:
        """Whether the next token is an assumed one: it need not be drawn."""
        return len(self.follow) < len(self.sequence.assumed)

    def next_input(self) -> DraftInput:
        """Return the unread positions first, then one position at a time."""
        length = self.sequence.length
        if self.hidden is None:
            return self.observed.unread(self.sequence, length)
        place = length - 2 + len(self.follow)
        token = np.array(self.follow[-1:], dtype=np.int64)
        return DraftInput(self.sequence.sequence_id, place, token, self.hidden.unsqueeze(0))

    def computed(self, hidden: Tensor) -> None:
        """Note that the input was computed, and the layer's hidden state there."""
        if self.hidden is None:
            self.observed.read(self.sequence.length - 1)
        self.hidden = hidden


class HiddenStateDrafter:
    """Drafts with an MTP or EAGLE layer, one call for the batch per drafted token.

    The target must return hidden states. Parts of a long prompt are read as they are scored, so
    few hidden states are kept.

    Args:
        model: the draft layer.
        max_positions: positions that the layer was made for: drafting stops before one beyond them
            would be computed. None for no limit.
        draws: how tokens are drawn, and the map of a reduced vocabulary.

    Raises:
        ArgumentError: ``max_positions`` is out of range.
    """

    def __init__(
        self,
        model: HiddenStateModel,
        *,
        max_positions: int | None = None,
        draws: DraftDraws | None = None,
    ) -> None:
        if max_positions is not None:
            check_integer("max_positions", max_positions, least=1)
        self._model = model
        self._max_positions = max_positions
        self._draws = draws or DraftDraws()
        self._states = HiddenStates(max_positions)

    @property
    def sequence_ids(self) -> frozenset[int]:
        """The sequences that something is held for."""
        return self._states.sequence_ids

    async def observe(
        self,
        batch: Sequence[DraftedSequence],
        scores: Scores,
        emitted: Sequence[Sequence[int]],
    ) -> None:
        """Keep the hidden states of verified positions, and read those of parts of prompts.

        Raises:
            ArgumentError: the target returned no hidden states, or too few for a row.
        """
        self._states.add(batch, scores, emitted)
        due = self._states.due(batch)
        if due:
            await self._model.next_output([row for _, row in due])
        for observed, row in due:
            observed.read(row.end)

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        """Propose up to ``k`` tokens after each sequence; fewer at the layer's last position.

        Nothing for a sequence whose prompt the target has not scored yet.

        Raises:
            DrafterError: names the sequences of which the target left out positions, or whose
                logits are NaN or leave no token.
        """
        self._states.refuse_gaps(sequences)
        drafts = [self._start(sequence, k) for sequence in sequences]
        while active := [draft for draft in drafts if not draft.done]:
            output = await self._model.next_output([draft.next_input() for draft in active])
            check_logits(output.logits, [len(active)])
            for draft, hidden in zip(active, output.hidden_states, strict=True):
                draft.computed(hidden)
            self._decide(active, output.logits)
        return [as_proposal(draft.drawn) for draft in drafts]

    def forget(self, sequence_id: int) -> None:
        """Drop what is held for a sequence, known or not."""
        self._states.forget(sequence_id)
        self._model.free(sequence_id)

    def _start(self, sequence: SequenceState, k: int) -> _Draft:
        last = sequence.length - 2 + len(sequence.assumed)
        room = drafts_that_fit(k, last, self._max_positions)
        ready = self._states.ready(sequence)
        return _Draft(sequence, self._states.of(sequence), room if ready else 0)

    def _decide(self, active: Sequence[_Draft], logits: Tensor) -> None:
        drawing = [row for row, draft in enumerate(active) if not draft.assumes]
        for draft in active:
            if draft.assumes:
                draft.follow.append(draft.sequence.assumed[len(draft.follow)])
        if not drawing:
            return
        drafts = [active[row] for row in drawing]
        sequences = [draft.sequence for draft in drafts]
        positions = [draft.sequence.length + len(draft.follow) for draft in drafts]
        drawn = self._draws.draw(sequences, positions, logits[drawing])
        for draft, one in zip(drafts, drawn, strict=True):
            draft.drawn.append(one)
            draft.follow.append(one[0])
