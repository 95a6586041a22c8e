"""A smaller language model as drafter."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from torch import Tensor

from ascend_specdecode.arguments import check_integer
from ascend_specdecode.drafters.draws import DraftDraws, as_proposal, as_tree
from ascend_specdecode.drafters.held import PerSequence, tokens_between
from ascend_specdecode.drafters.models import DraftInput, DraftModel
from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.protocols import NOTHING, Proposal
from ascend_specdecode.sequences import SequenceState


@attrs.define(eq=False)
class _Cached:
    """Which tokens the model holds state for: ``verified`` ones of the text, then ``drafted``."""

    verified: int = 0
    drafted: tuple[int, ...] = ()

    def usable(self, sequence: SequenceState) -> int:
        """Positions whose state is that of this sequence: rejected tokens end them."""
        base = min(self.verified, len(sequence))
        said = tokens_between(sequence, base, base + len(self.drafted)).tolist()
        same = 0
        while same < len(said) and said[same] == self.drafted[same]:
            same += 1
        return base + same

    def keep(self, sequence: SequenceState, length: int) -> None:
        """Note that exactly the first ``length`` tokens of the sequence have valid state."""
        self.verified = min(length, sequence.length)
        self.drafted = tuple(tokens_between(sequence, self.verified, length).tolist())


@attrs.define(eq=False)
class _Draft:
    """One sequence of a call: what is drawn so far, for each place the token and its siblings."""

    sequence: SequenceState
    cached: _Cached
    room: int
    levels: list[list[tuple[int, Tensor | None]]] = attrs.field(factory=list)

    @property
    def drawn(self) -> list[tuple[int, Tensor | None]]:
        """The first token of each place."""
        return [level[0] for level in self.levels]

    def next_input(self) -> DraftInput:
        """Return what to compute before the next draw; from here its state is not certain."""
        length = len(self.sequence)
        if self.levels:
            last = np.array([self.levels[-1][0][0]], dtype=np.int64)
            return DraftInput(self.sequence.sequence_id, length + len(self.levels) - 1, last)
        # The last token is computed again where all are cached: its logits are wanted.
        start = min(self.cached.usable(self.sequence), length - 1)
        self.cached.keep(self.sequence, start)
        tokens = tokens_between(self.sequence, start, length)
        return DraftInput(self.sequence.sequence_id, start, tokens)

    def computed(self) -> None:
        """Note that the input was computed."""
        if self.levels:
            self.cached.drafted += (self.levels[-1][0][0],)
        else:
            self.cached.keep(self.sequence, len(self.sequence))


class ModelDrafter:
    """Drafts with a causal model, one call for the batch per drafted token.

    A call computes the tokens that were verified since the last one, then one token at a time.
    Accepted drafts keep the state that they were drafted with; state of rejected ones is
    overwritten.

    With ``branches`` above 1 drafts are trees: at each place the model's first token, which it goes
    on from, and the next likely ones (sampled requests: other samples) beside it. A tree of k
    tokens is a path of k / branches tokens and as many calls.

    Args:
        model: the draft model.
        branches: tokens at each place.
        max_positions: positions that the model was made for: drafting stops before a token would
            be computed beyond them. None for no limit.
        draws: how tokens are drawn, and the map of a reduced vocabulary.

    Raises:
        ArgumentError: ``branches`` or ``max_positions`` is out of range.
    """

    def __init__(
        self,
        model: DraftModel,
        *,
        branches: int = 1,
        max_positions: int | None = None,
        draws: DraftDraws | None = None,
    ) -> None:
        check_integer("branches", branches, least=1)
        if max_positions is not None:
            check_integer("max_positions", max_positions, least=1)
        self._model = model
        self._branches = branches
        self._max_positions = max_positions
        self._draws = draws or DraftDraws()
        self._cached = PerSequence(_Cached)

    @property
    def sequence_ids(self) -> frozenset[int]:
        """The sequences that something is held for."""
        return self._cached.sequence_ids

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts are trees: with more than one branch."""
        return self._branches > 1

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        """Propose up to ``k`` tokens after each sequence; fewer at the model's last position.

        Raises:
            DrafterError: names the sequences whose logits are NaN or leave no token.
        """
        places = -(-k // self._branches)
        drafts = [self._start(sequence, places) for sequence in sequences]
        for step in range(places):
            active = [draft for draft in drafts if draft.room > step]
            if not active:
                break
            inputs = [draft.next_input() for draft in active]
            logits = await self._model.next_logits(inputs)
            check_logits(logits, [len(active)])
            for draft in active:
                draft.computed()
            self._draw(active, logits)
        return [self._proposal(draft, k) for draft in drafts]

    def forget(self, sequence_id: int) -> None:
        """Drop what is held for a sequence, known or not."""
        self._cached.forget(sequence_id)
        self._model.free(sequence_id)

    def _start(self, sequence: SequenceState, k: int) -> _Draft:
        room = drafts_that_fit(k, len(sequence) - 1, self._max_positions)
        return _Draft(sequence, self._cached.of(sequence.origin), room if len(sequence) else 0)

    def _proposal(self, draft: _Draft, k: int) -> Proposal:
        if not draft.levels:
            return NOTHING
        return as_tree(draft.levels, k) if self.drafts_trees else as_proposal(draft.drawn)

    def _draw(self, active: Sequence[_Draft], logits: Tensor) -> None:
        sequences = [draft.sequence for draft in active]
        positions = [len(draft.sequence) + len(draft.levels) for draft in active]
        drawn = self._draws.draw_siblings(sequences, positions, logits, self._branches)
        for draft, level in zip(active, drawn, strict=True):
            draft.levels.append(level)


def drafts_that_fit(k: int, last_position: int, max_positions: int | None) -> int:
    """How many of ``k`` tokens can be drafted if the first one is drawn at ``last_position``.

    Each further one computes one position more; the last drafted token is not computed.
    """
    return k if max_positions is None else min(k, max(0, max_positions - last_position))


def check_logits(logits: Tensor, leading: Sequence[int]) -> None:
    """Refuse logits of a draft model that are not [*leading, V] with V >= 1.

    Raises:
        ArgumentError: names what was found and what is allowed.
    """
    shape = list(logits.shape)
    if shape[:-1] != list(leading) or not shape[-1:] or not shape[-1]:
        allowed = f"shape {[*leading, 'V']} with V >= 1"
        raise ArgumentError("logits of the draft model", f"shape {shape}", allowed)
