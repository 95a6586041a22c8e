"""From a batch of drafted sequences to the tokens that a model computes, and back to scores."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from ascend_specdecode.drafted_paths import node_depths
from ascend_specdecode.protocols import DraftedSequence
from ascend_specdecode.trees import DraftTree


@attrs.frozen(eq=False)
class TokenRows:
    """The tokens that one call computes, sequence after sequence.

    Attributes:
        tokens: int64 [T], the positions that have no state yet.
        positions: int64 [T], of the tokens in their sequences.
        counts: tokens of each sequence; sums to T.
        ends: length of each sequence's state after the call, drafted tokens included.
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
        positions = [_positions(row) for row in batch]
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


def tree_mask(row: DraftedSequence, dtype: torch.dtype) -> torch.Tensor | None:
    """Who sees whom where a row has a tree: additive [1, 1, N, C + N], C cached tokens; else None.

    The N tokens that the call computes are those of the sequence that have no state, each of which
    sees all before it, and the drafted ones, which see the sequence and the drafted ones above.
    """
    parents = row.proposal.parents
    if parents is None:
        return None
    end, start = row.sequence.length, row.cached_length
    sees = torch.ones(end - start + len(parents), end + len(parents), dtype=torch.bool).tril(start)
    chosen = torch.tensor(parents, dtype=torch.int64)[None]
    counts = torch.tensor([len(parents)])
    sees[end - start :, end:] = DraftTree(chosen.clamp(min=0), chosen, counts).attention_mask()[0]
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)
    return mask[None, None]


def _positions(row: DraftedSequence) -> np.ndarray:
    end, parents = row.sequence.length, row.proposal.parents
    known = np.arange(row.cached_length, end)
    places = range(len(row.proposal.tokens)) if parents is None else node_depths(parents)
    return np.concatenate([known, end + np.array(places, dtype=np.int64)])


def _new_tokens(row: DraftedSequence) -> np.ndarray:
    known = row.sequence.since(row.cached_length)
    return np.concatenate([known, np.array(row.proposal.tokens, dtype=np.int64)])
