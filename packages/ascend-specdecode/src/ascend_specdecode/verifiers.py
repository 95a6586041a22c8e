"""Verifiers for an engine: what a scored batch emits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.protocols import DraftedSequence, Sampler, Scores
from ascend_specdecode.rejection import rejection_sample
from ascend_specdecode.sampling import GreedySampler, LogitsSampler
from ascend_specdecode.tensors import check_shape
from ascend_specdecode.typical import typical_acceptance_inexact
from ascend_specdecode.verification import PAD_TOKEN, verify_greedy

Emitted = list[tuple[int, ...]]


@attrs.frozen
class ExactVerifier:
    """Emits what the target itself would: its own tokens if greedy, else its distribution.

    Rows are verified together by kind: greedy, sampled with draft probabilities, sampled without.
    Random numbers depend only on the seed of a sequence and the position of a token.

    Attributes:
        sampler: turns logits into the distribution of each row. One that is also a
            :class:`~ascend_specdecode.GreedySampler` names the tokens of greedy rows itself.
    """

    sampler: Sampler = attrs.field(factory=LogitsSampler)
    exact: ClassVar[bool] = True

    async def verify(self, batch: Sequence[DraftedSequence], scores: Scores) -> Emitted:
        """Return the tokens of each row; see :class:`~ascend_specdecode.Verifier`.

        Raises:
            ArgumentError: as :meth:`verify_logits`.
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
            ArgumentError: the logits have another shape, are NaN or leave no token possible, or a
                drafted token or its probabilities do not fit the vocabulary.
        """
        _check_scores(batch, logits)
        emitted: Emitted = [()] * len(batch)
        for rows in self._kinds(batch):
            group = _Group.of([batch[row] for row in rows], logits, rows)
            tokens = self._verify_group(group)
            for row, emits in zip(rows, tokens.tolist(), strict=True):
                emitted[row] = tuple(token for token in emits if token != PAD_TOKEN)
        return emitted

    def _kinds(self, batch: Sequence[DraftedSequence]) -> list[list[int]]:
        names_greedy = isinstance(self.sampler, GreedySampler)
        kinds: dict[str, list[int]] = {}
        for index, row in enumerate(batch):
            if row.needs_scores:
                greedy = names_greedy and row.sequence.sampling.greedy
                with_draft = row.proposal.probabilities is not None and row.proposal.tokens
                kind = "greedy" if greedy else "with" if with_draft else "without"
                kinds.setdefault(kind, []).append(index)
        return list(kinds.values())

    def _verify_group(self, group: _Group) -> Tensor:
        first = group.batch[0]
        if isinstance(self.sampler, GreedySampler) and first.sequence.sampling.greedy:
            best = self.sampler.most_likely(group.batch, group.logits)
            group.refuse_impossible(best == PAD_TOKEN)
            return verify_greedy(group.draft_tokens, best, group.counts)
        probabilities = group.probabilities(self.sampler)
        return rejection_sample(
            group.draft_tokens,
            probabilities,
            group.draft_probabilities(),
            num_draft_tokens=group.counts,
            seeds=group.seeds,
            positions=group.positions,
        )


@attrs.frozen
class InexactTypicalVerifier:
    """Typical acceptance for an engine: accepts more, and is NOT exact. Opt-in.

    Attributes:
        sampler: turns logits into the distribution of each row.
        epsilon: in 0..1, see :func:`~ascend_specdecode.typical_acceptance_inexact`.
        delta: >= 0, see there.
    """

    sampler: Sampler = attrs.field(factory=LogitsSampler)
    epsilon: float = 0.09
    delta: float = 0.3
    exact: ClassVar[bool] = False

    async def verify(self, batch: Sequence[DraftedSequence], scores: Scores) -> Emitted:
        """Return the tokens of each row; NOT distributed as the target's own.

        Raises:
            ArgumentError: as :meth:`ExactVerifier.verify_logits`.
        """
        _check_scores(batch, scores.logits)
        rows = [index for index, row in enumerate(batch) if row.needs_scores]
        emitted: Emitted = [()] * len(batch)
        if not rows:
            return emitted
        group = _Group.of([batch[row] for row in rows], scores.logits, rows)
        found = typical_acceptance_inexact(
            group.draft_tokens,
            group.probabilities(self.sampler),
            num_draft_tokens=group.counts,
            epsilon=self.epsilon,
            delta=self.delta,
            seeds=group.seeds,
            positions=group.positions,
        )
        for row, emits in zip(rows, found.tokens.tolist(), strict=True):
            emitted[row] = tuple(token for token in emits if token != PAD_TOKEN)
        return emitted


@attrs.frozen(eq=False)
class _Group:
    """Rows of one kind as tensors: G rows, at most K drafted tokens each.

    Attributes:
        batch: the rows.
        logits: [G, K+1, V] float.
        draft_tokens: [G, K] int64, padded with 0.
        counts: [G] int64.
    """

    batch: Sequence[DraftedSequence]
    logits: Tensor
    draft_tokens: Tensor
    counts: Tensor

    @classmethod
    def of(cls, batch: Sequence[DraftedSequence], logits: Tensor, rows: Sequence[int]) -> _Group:
        drafts = [row.proposal.tokens for row in batch]
        width = max(len(draft) for draft in drafts)
        taken = logits if len(rows) == logits.shape[0] else logits[list(rows)]
        padded = [[*draft, *[0] * (width - len(draft))] for draft in drafts]
        tokens = torch.tensor(padded, device=logits.device).reshape(len(batch), width)
        counts = torch.tensor([len(draft) for draft in drafts], device=logits.device)
        return cls(batch, taken[:, : width + 1], tokens.long(), counts)

    @property
    def seeds(self) -> Tensor:
        seeds = [row.sequence.seed for row in self.batch]
        return torch.tensor(seeds, dtype=torch.int64, device=self.logits.device)

    @property
    def positions(self) -> Tensor:
        lengths = [row.sequence.length for row in self.batch]
        return torch.tensor(lengths, dtype=torch.int64, device=self.logits.device)

    def probabilities(self, sampler: Sampler) -> Tensor:
        """Return the target's distributions [G, K+1, V], none of them NaN where it counts."""
        probabilities = sampler.probabilities(self.batch, self.logits)
        self.refuse_impossible(probabilities[..., 0].isnan())  # NaN fills a whole row
        return probabilities

    def draft_probabilities(self) -> Tensor | None:
        """Return [G, K, V], zero beyond the drafted tokens; None where there are none."""
        rows = [row.proposal.probabilities for row in self.batch]
        if any(given is None for given in rows) or not self.draft_tokens.shape[1]:
            return None
        padded = self.logits.new_zeros(
            *self.draft_tokens.shape, self.logits.shape[-1], dtype=torch.float32
        )
        for out, given, row in zip(padded, rows, self.batch, strict=True):
            if given is not None:
                shape = [len(row.proposal.tokens), self.logits.shape[-1]]
                name = f"probabilities drafted for sequence {row.sequence.sequence_id}"
                check_shape(name, given, shape, "[len(tokens), V]")
                out[: len(given)] = given
        return padded

    def refuse_impossible(self, wrong: Tensor) -> None:
        """Refuse places [G, K+1] without a possible token, where the row has such a place."""
        if wrong.device.type != "cpu":
            return
        wrong = wrong & (torch.arange(wrong.shape[1]) <= self.counts.unsqueeze(1))
        if bool(wrong.any()):
            row, place = (int(index) for index in wrong.nonzero()[0])
            name = f"logits of sequence {self.batch[row].sequence.sequence_id} at place {place}"
            raise ArgumentError(name, "NaN, +inf or only -inf", "a possible token")


def _check_scores(batch: Sequence[DraftedSequence], logits: Tensor) -> None:
    if logits.dim() != 3:
        raise ArgumentError("logits", f"shape {list(logits.shape)}", "shape [B, K+1, V]")
    rows, width, vocabulary = logits.shape
    most = max((len(row.proposal.tokens) for row in batch if row.needs_scores), default=0)
    if rows != len(batch) or width <= most:
        allowed = f"shape [B, K+1, V] with B = {len(batch)} and K >= {most}"
        raise ArgumentError("logits", f"shape {list(logits.shape)}", allowed)
    for row in batch:
        if any(not 0 <= token < vocabulary for token in row.proposal.tokens):
            name = f"tokens drafted for sequence {row.sequence.sequence_id}"
            allowed = f"token ids 0..V-1 (V = {vocabulary})"
            raise ArgumentError(name, list(row.proposal.tokens), allowed)
