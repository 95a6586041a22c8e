"""From a batch of drafted sequences to the tokens that a model computes, and back to scores."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from ascend_specdecode.protocols import DraftedSequence


@attrs.frozen(eq=False)
class TokenRows:
    """The tokens that one call computes, sequence after sequence.

    Attributes:
        tokens: int64 [T], the positions that have no state yet.
        positions: int64 [T], of the tokens in their sequences.
        counts: tokens of each sequence; sums to T.
        ends: length of each sequence after the call, drafted tokens included.
        scored: int64 [S], those of the T tokens whose logits are wanted.
        scored_counts: how many of them each sequence has: its drafted tokens and one, or 0.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    counts: tuple[int, ...]
    ends: tuple[int, ...]
    scored: torch.Tensor
    scored_counts: tuple[int, ...]

    @classmethod
    def of(cls, batch: Sequence[DraftedSequence]) -> TokenRows:
        """The rows of a batch."""
        tokens = [_new_tokens(row) for row in batch]
        counts = tuple(len(part) for part in tokens)
        ends = tuple(row.sequence.length + len(row.proposal.tokens) for row in batch)
        positions = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        wanted = tuple(len(row.proposal.tokens) + 1 if row.needs_scores else 0 for row in batch)
        last = np.cumsum(counts)
        scored = [np.arange(end - count, end) for end, count in zip(last, wanted, strict=True)]
        flat = (torch.from_numpy(np.concatenate(x)) for x in (tokens, positions, scored))
        whole, places, chosen = flat
        return cls(whole, places, counts, ends, chosen, wanted)

    def padded_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] as [B, K+1, V]; entries that no sequence has are 0."""
        width = max([1, *self.scored_counts])
        out = logits.new_zeros((len(self.counts), width, logits.shape[-1]))
        for row, part in zip(out, logits.split(list(self.scored_counts)), strict=True):
            row[: len(part)] = part
        return out


def _new_tokens(row: DraftedSequence) -> np.ndarray:
    known = row.sequence.since(row.cached_length)
    return np.concatenate([known, np.array(row.proposal.tokens, dtype=np.int64)])
