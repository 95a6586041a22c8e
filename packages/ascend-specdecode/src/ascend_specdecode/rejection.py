"""Rejection sampling of drafted tokens: what is emitted is distributed as the target's own samples.

Rule (Leviathan et al. 2023; Chen et al. 2023): drafted token x, sampled from q, is accepted with
probability min(1, p(x) / q(x)). The first token that is rejected is replaced by one sampled from
max(p - q, 0), normalised; when none is rejected a bonus token is sampled from the target. Without
draft probabilities the draft is a point mass: q(x) = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_specdecode.choices import Choice, InverseCdf
from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.random_streams import Purpose, uniforms
from ascend_specdecode.tensors import (
    as_indices,
    check_distributions,
    check_indices,
    check_probabilities,
    check_range,
    check_same_dtype,
    check_shape,
    check_tensors,
)
from ascend_specdecode.verification import check_counts, count_leading, emit

LEFT_OVER: Final = 2.0**-100
"""Share of the target's own weight that a residual keeps.

Far below rounding, so the distribution is not changed; but where rounding makes the rest of a
residual zero, a token that the target can say is chosen all the same.
"""

_PART_ENTRIES: Final = 2**20
"""Weights that a CPU makes and chooses from at a time: 4 MB, which stay in its caches."""

_LARGE_VOCABULARY: Final = 2048
"""From here on a CPU is faster row by row: copying rows costs more than a call for each."""


@torch.no_grad()
def rejection_sample(
    draft_tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    *,
    num_draft_tokens: Tensor | Sequence[int] | None = None,
    seeds: Tensor | Sequence[int] | None = None,
    positions: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Accept or replace drafted tokens so that the output has the target's distribution.

    Request b emits its accepted drafted tokens and then one more token: the recovered token in the
    place of the first rejected one, or the bonus token when all were accepted.

    Every random number is a function of the request's seed and the position that it decides
    (:mod:`ascend_specdecode.random_streams`), so a request's tokens do not depend on who shares
    its batch. Give ``positions`` with ``seeds`` whenever a request has more than one step: without
    them every step is taken for the first one and would use the same numbers again.

    Args:
        draft_tokens: [B, K] int64 (or int32); row b holds num_draft_tokens[b] drafted tokens, what
            follows them is ignored.
        target_probs: [B, K+1, V] float32 (or float64), probabilities after temperature, top-k and
            so on; entry j follows the context and the first j drafted tokens. Entries after
            num_draft_tokens[b] are ignored.
        draft_probs: [B, K, V] float32 (or float64), the distribution that each drafted token was
            sampled from; None when the tokens were not sampled (prompt lookup, greedy drafts).
        num_draft_tokens: [B] int64 (or int32), each in 0..K; None is K for every request. Here and
            below a sequence of B ints does as well.
        seeds: [B] int64, one per request; None draws them from torch's default generator.
        positions: [B] int64, tokens in each sequence before this step (>= 0); None is 0.

    Returns:
        [B, K+1] int64: the emitted tokens of each request (at least one), then -1.

    Raises:
        ArgumentError: types, ranks, sizes, dtypes or devices disagree. For CPU tensors also: a
            count outside 0..K, a drafted token outside 0..V-1, a negative position, a row that does
            not sum to 1 or has a negative probability. On other devices values are not read, since
            that would stop the host.
    """
    check_tensors({"draft_tokens": draft_tokens, "target_probs": target_probs})
    counts = draft_counts(draft_tokens, num_draft_tokens)
    check_step(draft_tokens, target_probs, draft_probs, counts)
    streams = request_streams(draft_tokens, seeds, positions)
    accept, choose = chain_numbers(*streams, draft_tokens.shape[1])
    return rejection_sample_with(draft_tokens, target_probs, draft_probs, counts, accept, choose)


@torch.no_grad()
def rejection_sample_with(
    draft_tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    num_draft_tokens: Tensor,
    accept_uniforms: Tensor,
    choose: Choice,
) -> Tensor:
    """Do what :func:`rejection_sample` does with random numbers that are given; checks no values.

    With vLLM's uniforms as ``accept_uniforms`` and its noise in an
    :class:`~ascend_specdecode.ExponentialRace` the result is that of vLLM's rejection sampler
    (but for a uniform that equals p / q exactly, which vLLM accepts: with u = 0 that would be a
    token of probability 0).

    Args:
        draft_tokens: [B, K] int64 (or int32).
        target_probs: [B, K+1, V] float.
        draft_probs: [B, K, V] float, or None.
        num_draft_tokens: [B] int64 (or int32).
        accept_uniforms: [B, K] float in [0, 1); drafted token j is accepted when it is below p/q.
        choose: chooses the recovered or bonus token.

    Returns:
        [B, K+1] int64, as :func:`rejection_sample`.
    """
    tokens, counts = draft_tokens.long(), num_draft_tokens.long()
    accepted = _count_accepted(tokens, target_probs, draft_probs, counts, accept_uniforms)
    step = _Step(tokens, target_probs, draft_probs, accepted, accepted < counts)
    last = [choose(step.weights(rows), accepted[rows], rows) for rows in step.parts()]
    return emit(tokens, accepted, torch.cat(last) if last else accepted)


def chain_numbers(seeds: Tensor, positions: Tensor, width: int) -> tuple[Tensor, InverseCdf]:
    """Return the random numbers of :func:`rejection_sample` for K = ``width`` drafted tokens.

    Args:
        seeds: [B] int64.
        positions: [B] int64.
        width: drafted tokens K.

    Returns:
        [B, K] that accept, and what chooses the token after them.
    """
    at = positions.unsqueeze(1) + torch.arange(width + 1, device=seeds.device)
    rows = seeds.unsqueeze(1)
    accept = uniforms(rows, at[:, :-1], Purpose.ACCEPT)
    return accept, InverseCdf(uniforms(rows, at, Purpose.CHOOSE))


def request_streams(
    rows: Tensor, seeds: Tensor | Sequence[int] | None, positions: Tensor | Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Return seeds and positions [B] int64 for the B rows of ``rows``, checked or made.

    Raises:
        ArgumentError: a type, shape, dtype or device is wrong, or (on a CPU) a position is below 0.
    """
    batch, device = rows.shape[0], rows.device
    named = {"seeds": seeds, "positions": positions}
    given = {n: as_indices(n, values, device) for n, values in named.items() if values is not None}
    for name, tensor in given.items():
        check_shape(name, tensor, [batch], "[B]")
    check_indices(given, device, "draft_tokens")
    if "seeds" not in given:
        given["seeds"] = torch.randint(2**63 - 1, (batch,), device=device)
    if "positions" not in given:
        given["positions"] = torch.zeros(batch, dtype=torch.int64, device=device)
    elif device.type == "cpu":
        check_range("positions", given["positions"], "positions >= 0")
    return given["seeds"].long(), given["positions"].long()


def _count_accepted(
    tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    counts: Tensor,
    accept_uniforms: Tensor,
) -> Tensor:
    """Return how many leading drafted tokens are accepted: [B] int64."""
    width = tokens.shape[1]
    # What follows the drafted tokens is ignored, so it need not be a token.
    index = tokens.clamp(0, target_probs.shape[2] - 1).unsqueeze(2)
    ratio = target_probs[:, :width].gather(2, index).squeeze(2)
    if draft_probs is not None:
        drafted_with = draft_probs.gather(2, index).squeeze(2)
        ratio = torch.where(drafted_with > 0, ratio / drafted_with, 0)
    return count_leading(accept_uniforms < ratio, counts)


def residual(target: Tensor, draft: Tensor, out: Tensor) -> Tensor:
    """Write the weights max(target - draft, 0) to ``out``, which may be ``draft``; all [..., V].

    A share of 2^-100 of the target is left: see the module's constant.
    """
    torch.sub(target, draft, out=out)
    return out.clamp_(min=0).add_(target, alpha=LEFT_OVER)


@attrs.frozen(eq=False)
class _Step:
    """A step whose accepted tokens are known.

    Attributes:
        tokens: [B, K] int64.
        target_probs: [B, K+1, V].
        draft_probs: [B, K, V], or None.
        accepted: [B] int64.
        rejected: [B] bool, whether the token after the accepted ones was drafted.
    """

    tokens: Tensor
    target_probs: Tensor
    draft_probs: Tensor | None
    accepted: Tensor
    rejected: Tensor

    def parts(self) -> list[slice]:
        """Rows to handle at a time: on a CPU few enough for its cache, else all."""
        batch, _, vocabulary = self.target_probs.shape
        size = batch
        if self.tokens.device.type == "cpu":
            size = max(1, _PART_ENTRIES // vocabulary)
        return [slice(start, start + size) for start in range(0, batch, max(1, size))]

    def weights(self, rows: slice) -> Tensor:
        """Return the weights of the recovered or bonus token of some rows: [R, V]."""
        if self.draft_probs is None or not self.tokens.shape[1]:
            return self._without_rejected(rows)
        if self.tokens.device.type == "cpu" and self.target_probs.shape[2] >= _LARGE_VOCABULARY:
            return self._residuals_by_row(rows, self.draft_probs[rows])
        at = self.accepted[rows].clamp(max=self.tokens.shape[1] - 1)
        drafted_with = _rows_at(self.draft_probs[rows], at)
        drafted_with = torch.where(self.rejected[rows].unsqueeze(1), drafted_with, 0)
        return residual(self._target_rows(rows), drafted_with, out=drafted_with)

    def _target_rows(self, rows: slice) -> Tensor:
        return _rows_at(self.target_probs[rows], self.accepted[rows])

    def _without_rejected(self, rows: slice) -> Tensor:
        """Take the rejected token's weight away: the residual of a point mass."""
        weights = self._target_rows(rows)
        if not self.tokens.shape[1]:
            return weights
        at = self.accepted[rows].clamp(max=self.tokens.shape[1] - 1).unsqueeze(1)
        token = self.tokens[rows].gather(1, at).clamp(0, weights.shape[1] - 1)
        share = torch.where(self.rejected[rows].unsqueeze(1), LEFT_OVER, 1.0).to(weights.dtype)
        return weights.scatter_(1, token, weights.gather(1, token) * share)

    def _residuals_by_row(self, rows: slice, draft_probs: Tensor) -> Tensor:
        """Read each row where it is: with a large vocabulary, copying the rows costs most."""
        target = self.target_probs[rows]
        weights = target.new_empty(target.shape[0], target.shape[2])
        pairs = zip(self.rejected[rows].tolist(), self.accepted[rows].tolist(), strict=True)
        for row, (was_rejected, at) in enumerate(pairs):
            if was_rejected:
                residual(target[row, at], draft_probs[row, at], out=weights[row])
            else:
                weights[row] = target[row, at]
        return weights


def _rows_at(probabilities: Tensor, index: Tensor) -> Tensor:
    """Return entry ``index[b]`` of each row b of [B, J, V]: a copy [B, V]."""
    return probabilities[torch.arange(index.shape[0], device=index.device), index]


def draft_counts(draft_tokens: Tensor, given: Tensor | Sequence[int] | None) -> Tensor:
    """Return how many of the drafted tokens [B, K] each row has; None is K, 0 for another rank.

    Raises:
        ArgumentError: what is given is no tensor and no sequence of ints.
    """
    if given is not None:
        return as_indices("num_draft_tokens", given, draft_tokens.device)
    batch, width = (*draft_tokens.shape, 0, 0)[:2]
    return torch.full((batch,), width, dtype=torch.int64, device=draft_tokens.device)


def check_step(
    draft_tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    num_draft_tokens: Tensor,
) -> None:
    """Refuse what :func:`rejection_sample` says it refuses of these arguments.

    Raises:
        ArgumentError: names the argument, what was found and what is allowed.
    """
    check_draft(draft_tokens, "target_probs", target_probs, draft_probs, num_draft_tokens)
    if draft_tokens.device.type == "cpu":
        used = torch.arange(draft_tokens.shape[1] + 1) <= num_draft_tokens.unsqueeze(1)
        check_distributions("target_probs", target_probs, used)


def check_draft(
    draft_tokens: Tensor,
    target_name: str,
    target: Tensor,
    draft_probs: Tensor | None,
    num_draft_tokens: Tensor,
) -> None:
    """Refuse bad layouts of all, and bad values of all but the target's.

    Raises:
        ArgumentError: names the argument (the target's is ``target_name``), what was found and
            what is allowed.
    """
    _check_layout(draft_tokens, target_name, target, draft_probs, num_draft_tokens)
    if draft_tokens.device.type == "cpu":
        _check_values(draft_tokens, target.shape[2], draft_probs, num_draft_tokens)


def _check_layout(
    draft_tokens: Tensor,
    target_name: str,
    target: Tensor,
    draft_probs: Tensor | None,
    num_draft_tokens: Tensor,
) -> None:
    """Check what can be known without reading a value."""
    if draft_probs is not None:
        check_tensors({"draft_probs": draft_probs})
    if draft_tokens.dim() != 2:
        raise ArgumentError("draft_tokens", f"shape {list(draft_tokens.shape)}", "shape [B, K]")
    if target.dim() != 3 or target.shape[2] == 0:
        found = f"shape {list(target.shape)}"
        raise ArgumentError(target_name, found, "shape [B, K+1, V] with V >= 1")
    batch, width = draft_tokens.shape
    vocabulary = target.shape[2]
    check_shape(target_name, target, [batch, width + 1, vocabulary], "[B, K+1, V]")
    check_shape("num_draft_tokens", num_draft_tokens, [batch], "[B]")
    floats = {target_name: target}
    if draft_probs is not None:
        check_shape("draft_probs", draft_probs, [batch, width, vocabulary], "[B, K, V]")
        floats["draft_probs"] = draft_probs
    indices = {"draft_tokens": draft_tokens, "num_draft_tokens": num_draft_tokens}
    check_indices(indices, draft_tokens.device, "draft_tokens")
    check_probabilities(floats, draft_tokens.device, "draft_tokens")
    if draft_probs is not None:
        check_same_dtype("draft_probs", draft_probs, target_name, target)


def _check_values(
    draft_tokens: Tensor, vocabulary: int, draft_probs: Tensor | None, num_draft_tokens: Tensor
) -> None:
    width = draft_tokens.shape[1]
    check_counts(num_draft_tokens, width)
    drafted = torch.arange(width) < num_draft_tokens.unsqueeze(1)
    allowed = f"token ids 0..V-1 (V = {vocabulary})"
    check_range("draft_tokens", draft_tokens, allowed, most=vocabulary - 1, used=drafted)
    if draft_probs is not None:
        check_distributions("draft_probs", draft_probs, drafted)
