"""What the orchestrator asks of a drafter, a target and a verifier, and the records between them.

One step of a batch: the drafter proposes, the target scores sequence + drafted tokens in one call,
the verifier decides what is emitted, and state beyond that is given back by length. The
orchestrator hands ``ScoresT`` from target to verifier without looking into it: with torch it is
:class:`Scores`, a simulated pair may use plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar, runtime_checkable

import attrs
from torch import Tensor

from ascend_specdecode.sequences import SequenceState

ScoresT = TypeVar("ScoresT")
ScoresT_co = TypeVar("ScoresT_co", covariant=True)
ScoresT_contra = TypeVar("ScoresT_contra", contravariant=True)


@attrs.frozen(eq=False)
class Proposal:
    """Drafted tokens of one sequence.

    Attributes:
        tokens: what the drafter thinks comes next, at most the k that was asked for; may be empty.
        probabilities: [len(tokens), V] float, the distribution each token was sampled from; None
            where the drafter has none (prompt lookup) or took the most likely token: verification
            then treats it as a point mass on the token.
    """

    tokens: tuple[int, ...] = ()
    probabilities: Tensor | None = None

    def first(self, count: int) -> Proposal:
        """Return the first ``count`` drafted tokens."""
        return self.part(0, count)

    def part(self, start: int, end: int) -> Proposal:
        """Return the drafted tokens ``start``..``end`` with their probabilities."""
        if start == 0 and end >= len(self.tokens):
            return self
        probabilities = self.probabilities
        return Proposal(
            self.tokens[start:end], None if probabilities is None else probabilities[start:end]
        )


NOTHING: Final = Proposal()
"""No drafted token: the step is plain decoding."""


@attrs.frozen(eq=False)
class DraftedSequence:
    """One row of a step: a sequence and the tokens drafted after it.

    Attributes:
        sequence: verified tokens; never has assumed ones.
        proposal: what to score after them.
        cached_length: leading tokens that the target already holds state for; the call computes
            positions ``cached_length`` .. ``sequence.length + len(proposal.tokens)``.
        needs_scores: False for a part of a long prompt: the target only builds its state, its
            scores are ignored and nothing is emitted.
    """

    sequence: SequenceState
    proposal: Proposal = NOTHING
    cached_length: int = 0
    needs_scores: bool = True


@attrs.frozen(eq=False)
class Scores:
    """What a torch target returns for a batch of B rows.

    Attributes:
        logits: [B, K+1, V] float with K the most drafted tokens of a row; ``[b, j]`` is the
            distribution after sequence b and its first j drafted tokens. Entries with
            j > len(proposal.tokens), and rows that need no scores, are ignored.
        hidden_states: for drafters that read the target's hidden states, else None: entry b is
            [N_b, H], the positions that this call computed for row b (``cached_length`` on).
    """

    logits: Tensor
    hidden_states: Sequence[Tensor] | None = None


class Drafter(Protocol):
    """Proposes what a target may say next."""

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> Sequence[Proposal]:
        """Propose up to ``k`` (>= 1) tokens after each sequence, in the order given.

        A sequence with ``assumed`` tokens is drafted ahead: see :class:`SequenceState`. The call
        may be cancelled at any await; the drafter then must be able to go on with any sequence.

        Raises:
            DrafterError: names the sequences that cannot be drafted; any other exception counts
                for all sequences of the call. They go on without drafts.
        """
        ...

    def forget(self, sequence_id: int) -> None:
        """Drop what is held for a sequence, known or not. Not called while ``propose`` runs."""
        ...


@runtime_checkable
class ObservingDrafter(Protocol[ScoresT_contra]):
    """A drafter that also learns from what the target computed (MTP, EAGLE: hidden states)."""

    async def observe(
        self,
        batch: Sequence[DraftedSequence],
        scores: ScoresT_contra,
        emitted: Sequence[Sequence[int]],
    ) -> None:
        """See every scored batch, parts of prompts included.

        Never while ``propose`` runs, and before the next ``propose`` without assumed tokens: one
        that drafts ahead comes before the scores of the tokens it assumes are known.

        Args:
            batch: the rows that were scored.
            scores: what the target returned for them.
            emitted: tokens emitted by each row: accepted drafts and one of the target's own;
                empty for rows that needed no scores.
        """
        ...


class Target(Protocol[ScoresT_co]):
    """The model whose output is exact."""

    async def score(self, batch: Sequence[DraftedSequence]) -> ScoresT_co:
        """Score every drafted token of every row in one call.

        Afterwards the target holds state for all positions of the row, drafted ones included.

        Raises:
            TargetError: names the sequences that failed; any other exception fails all of them.
        """
        ...

    def roll_back(self, sequence_id: int, length: int) -> None:
        """Keep state for the first ``length`` tokens only; by length, nothing is copied."""
        ...

    def free(self, sequence_id: int) -> None:
        """Drop all state of a sequence, known or not. Not called while ``score`` runs."""
        ...


class Verifier(Protocol[ScoresT_contra]):
    """Decides what a scored batch emits."""

    async def verify(
        self, batch: Sequence[DraftedSequence], scores: ScoresT_contra
    ) -> Sequence[Sequence[int]]:
        """Return the tokens of each row: accepted drafts, then one recovered or bonus token.

        So a row with k drafted tokens emits 1..k+1 tokens and accepted all but the last; a row
        that needs no scores emits none. Random numbers depend only on ``sequence.seed`` and the
        position, so that a request's stream does not depend on who shares its batch.

        Raises:
            TargetError: names the sequences whose scores are unusable, such as NaN; any other
                exception fails all rows.
        """
        ...


class Sampler(Protocol):
    """Turns logits into the distribution that each row samples from."""

    def probabilities(self, batch: Sequence[DraftedSequence], logits: Tensor) -> Tensor:
        """Apply the sampling parameters of each row.

        Args:
            batch: B rows; ``[b, j]`` follows sequence b and its first j drafted tokens.
            logits: [B, K+1, V] float.

        Returns:
            [B, K+1, V] float32 probabilities; a greedy row has all its mass on one token.
        """
        ...
