"""Rejection sampling from logits: the softmax of a place is computed where it decides something.

What :func:`~ascend_specdecode.rejection_sample` does with the softmax of the logits, with the same
random numbers and the same tokens. A place after the first rejected token decides nothing, so on a
CPU its softmax is not computed, and no [B, K+1, V] of probabilities is written to memory: a few
requests at a time, place after place, for those whose drafts were accepted so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_specdecode.choices import Choice
from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.rejection import (
    LEFT_OVER,
    chain_numbers,
    check_draft,
    draft_counts,
    rejection_sample_with,
    request_streams,
    residual,
)
from ascend_specdecode.tensors import check_tensors
from ascend_specdecode.verification import emit

_PART_ENTRIES: Final = 2**19
"""Probabilities that are made at a time: 2 MB, which stay in a core's cache."""


@torch.no_grad()
def rejection_sample_logits(
    draft_tokens: Tensor,
    target_logits: Tensor,
    draft_probs: Tensor | None = None,
    *,
    num_draft_tokens: Tensor | Sequence[int] | None = None,
    seeds: Tensor | Sequence[int] | None = None,
    positions: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Accept or replace drafted tokens so that the output has the distribution of the logits.

    Args:
        draft_tokens: [B, K] int64 (or int32), as in :func:`~ascend_specdecode.rejection_sample`.
        target_logits: [B, K+1, V] float32 (or float64), after temperature, top-k and so on: -inf is
            a token that cannot be said.
        draft_probs: [B, K, V] of the same dtype, or None, as there.
        num_draft_tokens: [B] int64 (or int32), each in 0..K; None is K. Here and below a sequence
            of B ints does as well.
        seeds: [B] int64; None draws them.
        positions: [B] int64, tokens in each sequence before this step; None is 0.

    Returns:
        [B, K+1] int64: the emitted tokens of each request (at least one), then -1.

    Raises:
        ArgumentError: as :func:`~ascend_specdecode.rejection_sample`; for CPU tensors also: logits
            that decide are NaN, +inf or only -inf.
    """
    check_tensors({"draft_tokens": draft_tokens, "target_logits": target_logits})
    counts = draft_counts(draft_tokens, num_draft_tokens)
    check_draft(draft_tokens, "target_logits", target_logits, draft_probs, counts)
    streams = request_streams(draft_tokens, seeds, positions)
    accept, choose = chain_numbers(*streams, draft_tokens.shape[1])
    tokens, undecided = sample_logits_with(
        draft_tokens, target_logits, draft_probs, counts, accept, choose
    )
    if draft_tokens.device.type == "cpu" and bool(undecided.any()):
        row = int(undecided.nonzero()[0])
        raise ArgumentError(f"target_logits[{row}]", "NaN, +inf or only -inf", "a possible token")
    return tokens


@torch.no_grad()
def sample_logits_with(
    draft_tokens: Tensor,
    target_logits: Tensor,
    draft_probs: Tensor | None,
    num_draft_tokens: Tensor,
    accept_uniforms: Tensor,
    choose: Choice,
) -> tuple[Tensor, Tensor]:
    """Do what :func:`rejection_sample_logits` does with random numbers that are given.

    Args:
        draft_tokens: [B, K] int64 (or int32).
        target_logits: [B, K+1, V] float32 (or float64).
        draft_probs: [B, K, V] of the same dtype, or None.
        num_draft_tokens: [B] int64 (or int32).
        accept_uniforms: [B, K] float in [0, 1).
        choose: chooses the recovered or bonus token.

    Returns:
        [B, K+1] int64 as :func:`rejection_sample_logits`, and [B] bool: the rows in which a place
        that decides has no distribution (on a CPU; elsewhere they are not looked for). These rows
        emit nothing of use.
    """
    tokens, counts = draft_tokens.long(), num_draft_tokens.long()
    batch, _, vocabulary = target_logits.shape
    if draft_tokens.device.type != "cpu":
        probabilities = target_logits.softmax(dim=-1)
        found = rejection_sample_with(
            tokens, probabilities, draft_probs, counts, accept_uniforms, choose
        )
        return found, torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    step = _LazyStep(tokens, target_logits, draft_probs, counts, accept_uniforms)
    size = max(1, _PART_ENTRIES // vocabulary)
    weights = target_logits.new_empty(min(size, batch), vocabulary)
    last = torch.zeros_like(counts)
    for start in range(0, batch, size):
        rows = slice(start, min(start + size, batch))
        part = weights[: rows.stop - rows.start]
        step.decide(rows, part)
        last[rows] = choose(part, step.accepted[rows], rows)
    return emit(tokens, step.accepted, last), step.undecided


@attrs.define(eq=False)
class _LazyStep:
    """A step on a CPU, of which ``accepted`` [B] and ``undecided`` [B] become known row by row."""

    tokens: Tensor
    logits: Tensor
    draft_probs: Tensor | None
    counts: Tensor
    accept_uniforms: Tensor
    accepted: Tensor = attrs.field(init=False)
    undecided: Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.accepted = torch.zeros_like(self.counts)
        self.undecided = torch.zeros(len(self.counts), dtype=torch.bool)

    def decide(self, rows: slice, weights: Tensor) -> None:
        """Accept drafts of some rows; write the weights [R, V] of the token after them."""
        alive = torch.arange(rows.start, rows.stop)
        place = 0
        while len(alive):
            probabilities = self.logits[alive, place].softmax(dim=-1)
            accepts = self._accepts(alive, place, probabilities)
            self.accepted[alive] += accepts
            for index in (~accepts).nonzero().flatten().tolist():
                row = int(alive[index])
                self._weigh(row, place, probabilities[index], weights[row - rows.start])
            alive = alive[accepts]
            place += 1

    def _accepts(self, alive: Tensor, place: int, probabilities: Tensor) -> Tensor:
        wrong = probabilities[:, 0].isnan()  # NaN fills a whole row
        if bool(wrong.any()):
            self.undecided[alive[wrong]] = True
            probabilities[wrong] = 1.0
        if place == self.tokens.shape[1]:
            return torch.zeros_like(wrong)
        # What follows the drafted tokens is ignored, so it need not be a token.
        token = self.tokens[alive, place].clamp(0, probabilities.shape[1] - 1)
        ratio = probabilities.gather(1, token.unsqueeze(1)).squeeze(1)
        if self.draft_probs is not None:
            offered = self.draft_probs[alive, place, token]
            ratio = torch.where(offered > 0, ratio / offered, 0)
        accepts = self.accept_uniforms[alive, place] < ratio
        return accepts & (place < self.counts[alive]) & ~wrong

    def _weigh(self, row: int, place: int, probabilities: Tensor, out: Tensor) -> None:
        """Write the weights of the bonus token, or of the one that replaces a rejected draft."""
        if place >= int(self.counts[row]):
            out.copy_(probabilities)
        elif self.draft_probs is not None:
            residual(probabilities, self.draft_probs[row, place], out=out)
        else:
            out.copy_(probabilities)
            out[self.tokens[row, place].clamp(0, len(out) - 1)] *= LEFT_OVER
