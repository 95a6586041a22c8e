"""What the orchestrator asks of a drafter, a target and a verifier, and the records between them.

One step of a batch: the drafter proposes, the target scores sequence + drafted tokens in one call,
the verifier decides what is emitted, and state beyond that is given back by length. The
orchestrator hands ``ScoresT`` from target to verifier without looking into it: with torch it is
:class:`Scores`, a simulated pair may use plain Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar, runtime_checkable

import attrs
from torch import Tensor

from ascend_specdecode.sequences import SequenceState

ScoresT = TypeVar("ScoresT")
ScoresT_co = TypeVar("ScoresT_co", covariant=True)
ScoresT_contra = TypeVar("ScoresT_contra", contravariant=True)


def _whole(numbers: Iterable[int]) -> tuple[int, ...]:
    """Take lists, arrays and tensors too: drafters have those."""
    return numbers if type(numbers) is tuple else tuple(int(one) for one in numbers)


def _whole_or_none(numbers: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if numbers is None else _whole(numbers)


@attrs.frozen(eq=False)
class Proposal:
    """Drafted tokens of one sequence: one after the other, or a tree (:class:`TreeDrafter`).

    Attributes:
        tokens: what the drafter thinks comes next, at most the k that was asked for; may be empty.
        probabilities: [len(tokens), V] float, the distribution each token was sampled from (in a
            tree: given the siblings before it); None where the drafter has none (prompt lookup) or
            took the most likely token: verification then treats it as a point mass on the token.
        parents: None where each token follows the one before it. In a tree the index of the token
            that each one follows, below its own; -1 for those that follow the sequence. State of
            the first path (tokens 0, 1, 2 ... for as long as each follows the one before) is kept
            when it is accepted, so the likeliest path comes first.
    """

    tokens: tuple[int, ...] = attrs.field(default=(), converter=_whole)
    probabilities: Tensor | None = None
    parents: tuple[int, ...] | None = attrs.field(default=None, converter=_whole_or_none)

    def first(self, count: int) -> Proposal:
        """Return the first ``count`` drafted tokens; of a tree that is a tree again."""
        if count >= len(self.tokens):
            return self
        probabilities, parents = self.probabilities, self.parents
        return Proposal(
            self.tokens[:count],
            None if probabilities is None else probabilities[:count],
            None if parents is None else parents[:count],
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
            distribution after sequence b and its first j drafted tokens; in a tree after the j-th
            token and those above it. Entries with j > len(proposal.tokens), and rows that need no
            scores, are ignored.
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
class TreeDrafter(Drafter, Protocol):
    """A drafter whose proposals may be trees, of up to k tokens over all paths.

    Its target must be a :class:`TreeTarget` and its verifier a :class:`TreeVerifier`.
    """

    @property
    def drafts_trees(self) -> bool:
        """Whether its proposals may have ``parents``."""
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


@runtime_checkable
class TreeTarget(Target[ScoresT_co], Protocol):
    """A target that scores trees: each drafted token sees the sequence and the tokens above it.

    The state of a tree's tokens follows that of the sequence in their order. Of an accepted path
    only the part that is first in that order is kept, by length; the rest is computed again with
    the next step, so nothing is copied.
    """

    @property
    def scores_trees(self) -> bool:
        """Whether proposals may have ``parents``."""
        ...


@runtime_checkable
class SizedTarget(Target[ScoresT_co], Protocol):
    """A target that says how many tokens it knows; ids beyond are refused before they reach it."""

    @property
    def vocabulary_size(self) -> int:
        """Tokens V that it scores; ids are 0..V-1."""
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
            DrafterError: names the sequences whose drafts are unusable, such as probabilities that
                are no distribution; the batch is verified again without these drafts.
            TargetError: names the sequences whose scores are unusable, such as NaN; any other
                exception fails all rows.
        """
        ...


@runtime_checkable
class TreeVerifier(Verifier[ScoresT_contra], Protocol):
    """A verifier that takes trees: it emits an accepted path and one more token."""

    @property
    def verifies_trees(self) -> bool:
        """Whether proposals may have ``parents``."""
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
