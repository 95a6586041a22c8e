"""Drafting a block of tokens in one call: DFlash, Medusa heads.

The distribution of each token of a block does not depend on the others of the block, so all are
drawn from one call. Rejection sampling needs no more: each token was sampled from its distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ascend_specdecode.arguments import check_integer
from ascend_specdecode.drafters.draft_model import check_logits
from ascend_specdecode.drafters.draws import DraftDraws, as_proposal
from ascend_specdecode.drafters.held import PerSequence, tokens_between
from ascend_specdecode.drafters.models import BlockModel, DraftInput
from ascend_specdecode.drafters.observed import HiddenStates
from ascend_specdecode.protocols import NOTHING, DraftedSequence, Proposal, Scores
from ascend_specdecode.sequences import SequenceState


class BlockDrafter:
    """Drafts all k tokens of a sequence in one call.

    Args:
        model: the block model.
        reads_hidden_states: True: the model reads the target's hidden states (DFlash, Medusa), and
            a sequence with assumed tokens is not drafted, as the target has no states of these.
            False: it reads tokens.
        max_positions: positions that the model was made for: a block ends before it. None for no
            limit.
        draws: how tokens are drawn, and the map of a reduced vocabulary.

    Raises:
        ArgumentError: ``max_positions`` or the model's block size is out of range.
    """

    def __init__(
        self,
        model: BlockModel,
        *,
        reads_hidden_states: bool = True,
        max_positions: int | None = None,
        draws: DraftDraws | None = None,
    ) -> None:
        check_integer("model.block_size", model.block_size, least=1)
        if max_positions is not None:
            check_integer("max_positions", max_positions, least=1)
        self._model = model
        self._max_positions = max_positions
        self._draws = draws or DraftDraws()
        self._states = HiddenStates(max_positions) if reads_hidden_states else None
        self._read = PerSequence(_Read)

    @property
    def sequence_ids(self) -> frozenset[int]:
        """The sequences that something is held for."""
        observed = frozenset() if self._states is None else self._states.sequence_ids
        return self._read.sequence_ids | observed

    async def observe(
        self,
        batch: Sequence[DraftedSequence],
        scores: Scores,
        emitted: Sequence[Sequence[int]],
    ) -> None:
        """Keep the hidden states of verified positions, where the model reads them.

        Raises:
            ArgumentError: the target returned no hidden states, or too few for a row.
        """
        if self._states is None:
            return
        self._states.add(batch, scores, emitted)
        due = self._states.due(batch)
        if due:
            await self._model.block_logits([row for _, row in due], 0)
        for observed, row in due:
            observed.read(row.end)

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        """Propose ``k`` tokens after each sequence, at most a block; fewer at the last position.

        Nothing for a sequence whose prompt the target has not scored yet, if the model reads its
        hidden states.

        Raises:
            DrafterError: names the sequences of which the target left out positions, or whose
                logits are NaN or leave no token.
        """
        if self._states is not None:
            self._states.refuse_gaps(sequences)
        proposals = [NOTHING] * len(sequences)
        by_room: dict[int, list[int]] = {}
        for row, sequence in enumerate(sequences):
            by_room.setdefault(self._room(sequence, k), []).append(row)
        by_room.pop(0, None)
        for room, rows in by_room.items():
            drafted = await self._draft([sequences[row] for row in rows], room)
            for row, proposal in zip(rows, drafted, strict=True):
                proposals[row] = proposal
        return proposals

    def forget(self, sequence_id: int) -> None:
        """Drop what is held for a sequence, known or not."""
        if self._states is not None:
            self._states.forget(sequence_id)
        self._read.forget(sequence_id)
        self._model.free(sequence_id)

    def _room(self, sequence: SequenceState, k: int) -> int:
        states = self._states
        if not len(sequence) or (states and (sequence.assumed or not states.ready(sequence))):
            return 0
        room = min(k, self._model.block_size)
        if self._max_positions is not None:
            room = min(room, max(0, self._max_positions - len(sequence)))
        return room

    async def _draft(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        logits = await self._model.block_logits([self._input(one) for one in sequences], k)
        check_logits(logits, [len(sequences), k])
        for sequence in sequences:
            self._note_read(sequence)
        drawn = [
            self._draws.draw(sequences, [len(one) + place for one in sequences], logits[:, place])
            for place in range(k)
        ]
        return [as_proposal(row) for row in zip(*drawn, strict=True)]

    def _input(self, sequence: SequenceState) -> DraftInput:
        if self._states is not None:
            return self._states.of(sequence).unread(sequence, sequence.length)
        start = min(self._read.of(sequence.origin).verified, len(sequence) - 1)
        tokens = tokens_between(sequence, start, len(sequence))
        return DraftInput(sequence.sequence_id, start, tokens)

    def _note_read(self, sequence: SequenceState) -> None:
        if self._states is not None:
            self._states.of(sequence).read(sequence.length - 1)
        else:
            self._read.of(sequence.origin).verified = sequence.length


@attrs.define
class _Read:
    """How many verified positions the model has state for."""

    verified: int = 0
