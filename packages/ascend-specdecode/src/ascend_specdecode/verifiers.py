"""Verifiers for an engine: what a scored batch emits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
from torch import Tensor

from ascend_specdecode.errors import ArgumentError, TargetError
from ascend_specdecode.protocols import DraftedSequence, Sampler, Scores
from ascend_specdecode.rejection import chain_numbers, rejection_sample_with
from ascend_specdecode.sampling import GreedySampler, LogitsSampler
from ascend_specdecode.trees import rejection_sample_tree_with, tree_numbers, verify_tree_greedy
from ascend_specdecode.typical import typical_acceptance_inexact
from ascend_specdecode.verification import PAD_TOKEN, verify_greedy
from ascend_specdecode.verified_rows import RowGroup, check_drafts, check_logits

Emitted = list[tuple[int, ...]]


@attrs.frozen
class ExactVerifier:
    """Emits what the target itself would: its own tokens if greedy, else its distribution.

    Rows are verified together by kind: greedy, sampled with draft probabilities, sampled without;
    chains and trees. Random numbers depend only on the seed of a sequence and the position of a
    token.

    Attributes:
        sampler: turns logits into the distribution of each row. One that is also a
            :class:`~ascend_specdecode.GreedySampler` names the tokens of greedy rows itself.
    """

    sampler: Sampler = attrs.field(factory=LogitsSampler)
    exact: ClassVar[bool] = True
    verifies_trees: ClassVar[bool] = True

    async def verify(self, batch: Sequence[DraftedSequence], scores: Scores) -> Emitted:
        """Return the tokens of each row; see :class:`~ascend_specdecode.Verifier`.

        Raises:
            ArgumentError, DrafterError, TargetError: as :meth:`verify_logits`.
        """
        return self.verify_logits(batch, scores.logits)

    def verify_logits(self, batch: Sequence[DraftedSequence], logits: Tensor) -> Emitted:
        """Return the tokens of each row, without an event loop.

        Args:
            batch: B rows.
            logits: [B, K+1, V] float, K at least the most drafted tokens of a row.

        Returns:
            Per row its accepted drafts and one token more; nothing where no scores are needed.

        Raises:
            ArgumentError: the logits have another shape than the batch needs.
            DrafterError: names the rows whose drafted tokens or their probabilities do not fit the
                vocabulary, or (on a CPU) whose probabilities are no distributions.
            TargetError: names the rows whose bias is for a token beyond the vocabulary, or (on a
                CPU) whose logits are NaN or leave no token possible.
        """
        check_logits(batch, logits)
        check_drafts(batch, logits)
        groups = [RowGroup.of(batch, logits, rows) for rows in self._kinds(batch)]
        weights = [self._weights(group) for group in groups]
        _refuse_impossible(
            [group.impossible(own) for group, own in zip(groups, weights, strict=True)]
        )
        emitted: Emitted = [()] * len(batch)
        for group, own in zip(groups, weights, strict=True):
            for row, emits in zip(group.rows, self._verify(group, own).tolist(), strict=True):
                emitted[row] = tuple(token for token in emits if token != PAD_TOKEN)
        return emitted

    def _kinds(self, batch: Sequence[DraftedSequence]) -> list[list[int]]:
        kinds: dict[tuple[str, bool], list[int]] = {}
        for index, row in enumerate(batch):
            if row.needs_scores:
                with_draft = row.proposal.probabilities is not None and row.proposal.tokens
                kind = "greedy" if self._names(row) else "with" if with_draft else "without"
                kinds.setdefault((kind, row.proposal.parents is not None), []).append(index)
        return list(kinds.values())

    def _names(self, row: DraftedSequence) -> bool:
        """Whether the sampler names the tokens of this row, a greedy one."""
        return isinstance(self.sampler, GreedySampler) and row.sequence.sampling.greedy

    def _weights(self, group: RowGroup) -> Tensor:
        """Return the target's own tokens [G, K+1] of greedy rows, else its distributions."""
        if self._names(group.batch[0]) and isinstance(self.sampler, GreedySampler):
            return self.sampler.most_likely(group.batch, group.logits)
        return self.sampler.probabilities(group.batch, group.logits)

    def _verify(self, group: RowGroup, weights: Tensor) -> Tensor:
        if group.parents is None:
            if weights.dim() == 2:
                return verify_greedy(group.draft_tokens, weights, group.counts)
            accept, choose = chain_numbers(
                group.seeds, group.positions, group.draft_tokens.shape[1]
            )
            drafted_with = group.draft_probabilities(weights.dtype)
            return rejection_sample_with(
                group.draft_tokens, weights, drafted_with, group.counts, accept, choose
            )
        tree = group.tree()
        if weights.dim() == 2:
            return verify_tree_greedy(tree, weights).tokens
        accept, choose = tree_numbers(tree, group.seeds, group.positions)
        drafted_with = group.draft_probabilities(weights.dtype)
        return rejection_sample_tree_with(tree, weights, drafted_with, accept, choose).tokens


@attrs.frozen
class InexactTypicalVerifier:
    """Typical acceptance for an engine: accepts more, and is NOT exact. Opt-in; no trees.

    Attributes:
        sampler: turns logits into the distribution of each row.
        epsilon: in 0..1, see :func:`~ascend_specdecode.typical_acceptance_inexact`.
        delta: >= 0, see there.
    """

    sampler: Sampler = attrs.field(factory=LogitsSampler)
    epsilon: float = 0.09
    delta: float = 0.3
    exact: ClassVar[bool] = False
    verifies_trees: ClassVar[bool] = False

    async def verify(self, batch: Sequence[DraftedSequence], scores: Scores) -> Emitted:
        """Return the tokens of each row; NOT distributed as the target's own.

        Raises:
            ArgumentError: a row has a tree.
            ArgumentError, DrafterError, TargetError: as :meth:`ExactVerifier.verify_logits`.
        """
        check_logits(batch, scores.logits)
        check_drafts(batch, scores.logits)
        rows = [index for index, row in enumerate(batch) if row.needs_scores]
        emitted: Emitted = [()] * len(batch)
        if not rows:
            return emitted
        group = RowGroup.of(batch, scores.logits, rows)
        if group.parents is not None:
            raise ArgumentError("proposal", "a tree", "a chain, for typical acceptance")
        probabilities = self.sampler.probabilities(group.batch, group.logits)
        _refuse_impossible([group.impossible(probabilities)])
        found = typical_acceptance_inexact(
            group.draft_tokens,
            probabilities,
            num_draft_tokens=group.counts,
            epsilon=self.epsilon,
            delta=self.delta,
            seeds=group.seeds,
            positions=group.positions,
        )
        for row, emits in zip(rows, found.tokens.tolist(), strict=True):
            emitted[row] = tuple(token for token in emits if token != PAD_TOKEN)
        return emitted


def _refuse_impossible(found: Sequence[dict[int, int]]) -> None:
    """Refuse sequences, each with the first place at which no token is possible."""
    places = {sequence: place for part in found for sequence, place in part.items()}
    if places:
        listed = ", ".join(f"{sequence} at place {place}" for sequence, place in places.items())
        message = "no token is possible: logits are NaN, +inf or only -inf, or the sampler "
        message += f"returned no distribution, for sequence {listed}"
        raise TargetError(message, places)
