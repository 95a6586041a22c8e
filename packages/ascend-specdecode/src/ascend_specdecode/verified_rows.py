"""Rows of a scored batch as tensors for verification, and the checks that name bad rows."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ascend_specdecode.errors import ArgumentError, DrafterError, TargetError
from ascend_specdecode.protocols import DraftedSequence
from ascend_specdecode.tensors import no_distributions
from ascend_specdecode.trees import ROOT, DraftTree
from ascend_specdecode.verification import PAD_TOKEN


@attrs.frozen(eq=False)
class RowGroup:
    """Rows of one kind: G rows, at most K drafted tokens each, all chains or all trees.

    Attributes:
        rows: their indices in the batch.
        batch: the rows.
        logits: [G, K+1, V] float.
        draft_tokens: [G, K] int64, padded with 0.
        counts: [G] int64.
        parents: [G, K] int64 of trees, padded with -1; None for chains.
    """

    rows: Sequence[int]
    batch: Sequence[DraftedSequence]
    logits: Tensor
    draft_tokens: Tensor
    counts: Tensor
    parents: Tensor | None

    @classmethod
    def of(cls, whole: Sequence[DraftedSequence], logits: Tensor, rows: Sequence[int]) -> RowGroup:
        """The rows of a batch with these indices; logits [B, K'+1, V] are those of the batch."""
        batch = [whole[row] for row in rows]
        drafts = [row.proposal.tokens for row in batch]
        width = max(len(draft) for draft in drafts)
        taken = logits if len(rows) == logits.shape[0] else logits[list(rows)]
        counts = torch.tensor([len(draft) for draft in drafts], device=logits.device)
        parents = [row.proposal.parents for row in batch]
        above = None
        if any(given is not None for given in parents):
            above = _padded([given or () for given in parents], width, ROOT, logits.device)
        tokens = _padded(drafts, width, 0, logits.device)
        return cls(rows, batch, taken[:, : width + 1], tokens, counts, above)

    @property
    def seeds(self) -> Tensor:
        """Seed of each row's sequence: [G] int64."""
        seeds = [row.sequence.seed for row in self.batch]
        return torch.tensor(seeds, dtype=torch.int64, device=self.logits.device)

    @property
    def positions(self) -> Tensor:
        """Tokens in each row's sequence: [G] int64."""
        lengths = [row.sequence.length for row in self.batch]
        return torch.tensor(lengths, dtype=torch.int64, device=self.logits.device)

    def tree(self) -> DraftTree:
        """The drafted tokens as trees."""
        assert self.parents is not None  # noqa: S101 - the caller has looked
        return DraftTree(self.draft_tokens, self.parents, self.counts)

    def draft_probabilities(self, dtype: torch.dtype) -> Tensor | None:
        """Return [G, K, V], zero beyond the drafted tokens; None where there are none."""
        rows = [row.proposal.probabilities for row in self.batch]
        if any(given is None for given in rows) or not self.draft_tokens.shape[1]:
            return None
        padded = self.logits.new_zeros(*self.draft_tokens.shape, self.logits.shape[-1], dtype=dtype)
        for out, given in zip(padded, rows, strict=True):
            if given is not None:
                out[: len(given)] = given
        return padded

    def impossible(self, weights: Tensor) -> dict[int, int]:
        """Return the sequences with a place where no token is possible, and the first such place.

        Args:
            weights: [G, K+1] tokens, -1 where none is possible; or [G, K+1, V] distributions, NaN
                there. On a device they are not read, since that would stop the host.
        """
        if weights.device.type != "cpu":
            return {}
        wrong = weights == PAD_TOKEN if weights.dim() == 2 else no_distributions(weights)
        wrong = wrong & (torch.arange(wrong.shape[1]) <= self.counts.unsqueeze(1))
        found: dict[int, int] = {}
        for row, place in wrong.nonzero().tolist():
            found.setdefault(self.batch[row].sequence.sequence_id, place)
        return found


def check_logits(batch: Sequence[DraftedSequence], logits: Tensor) -> None:
    """Refuse logits that are not [B, K+1, V] for this batch, and rows with a bias beyond V.

    Raises:
        ArgumentError: the shape is another.
        TargetError: names the rows whose bias is for a token that the target does not have.
    """
    if logits.dim() != 3:
        raise ArgumentError("logits", f"shape {list(logits.shape)}", "shape [B, K+1, V]")
    rows, width, vocabulary = logits.shape
    most = max((len(row.proposal.tokens) for row in batch if row.needs_scores), default=0)
    if rows != len(batch) or width <= most:
        allowed = f"shape [B, K+1, V] with B = {len(batch)} and K >= {most}"
        raise ArgumentError("logits", f"shape {list(logits.shape)}", allowed)
    biases = {row.sequence.sequence_id: row.sequence.sampling.logit_bias for row in batch}
    beyond = {one: max(bias) for one, bias in biases.items() if bias and max(bias) >= vocabulary}
    if beyond:
        message = f"logit_bias: found tokens {sorted(beyond.values())}, allowed 0..{vocabulary - 1}"
        raise TargetError(message, beyond)


def check_drafts(batch: Sequence[DraftedSequence], logits: Tensor) -> None:
    """Refuse drafts that do not fit logits [B, K+1, V].

    Raises:
        DrafterError: names the rows and says what is wrong with the first of them.
    """
    faults = {row.sequence.sequence_id: _draft_fault(row, logits) for row in batch}
    named = {sequence: fault for sequence, fault in faults.items() if fault is not None}
    if named:
        sequence, fault = next(iter(named.items()))
        raise DrafterError(f"drafted for sequence {sequence}: {fault}", named)


def _draft_fault(row: DraftedSequence, logits: Tensor) -> str | None:
    tokens, given, vocabulary = row.proposal.tokens, row.proposal.probabilities, logits.shape[-1]
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        return f"found tokens {list(tokens)}, allowed token ids 0..V-1 (V = {vocabulary})"
    if given is None or not tokens:
        return None
    if list(given.shape) != [len(tokens), vocabulary]:
        allowed = f"shape [len(tokens), V] = {[len(tokens), vocabulary]}"
        return f"found probabilities of shape {list(given.shape)}, allowed {allowed}"
    if not given.is_floating_point():
        return f"found probabilities of {given.dtype}, allowed a floating point dtype"
    if given.device.type != "cpu":
        return None
    wrong = no_distributions(given.float().unsqueeze(0))[0]
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        return f"the probabilities of drafted token {place} are no distribution"
    return None


def _padded(rows: Sequence[Sequence[int]], width: int, value: int, device: torch.device) -> Tensor:
    padded = [[*row, *[value] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(rows), width)
