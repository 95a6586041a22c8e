"""From a target's logits to the distribution that a request samples from.

Order and definitions are those of vLLM's sampler, which agree with the logits processors of
transformers: logit bias, repetition, frequency and presence penalty, temperature, top-k, top-p,
softmax in float32. Penalties see, for the token after j drafted ones, these j as output too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.penalties import TokenCounts, apply_penalties
from ascend_specdecode.protocols import DraftedSequence
from ascend_specdecode.tensors import check_shape

_TINY_TEMPERATURE: Final = 1e-3
"""Below it logits are shifted first, since their quotient could leave the range of float32."""


@runtime_checkable
class GreedySampler(Protocol):
    """A :class:`~ascend_specdecode.Sampler` that names the most likely tokens directly."""

    def most_likely(self, batch: Sequence[DraftedSequence], logits: Tensor) -> Tensor:
        """Return the tokens that greedy rows take: [B, K+1] int64, for logits [B, K+1, V]."""
        ...


class LogitsSampler:
    """The sampling parameters of each request applied to its logits.

    A subclass may override :meth:`adjusted`, for example to forbid what a grammar does not allow.
    """

    @torch.no_grad()
    def probabilities(self, batch: Sequence[DraftedSequence], logits: Tensor) -> Tensor:
        """Apply the sampling parameters of each row.

        Args:
            batch: B rows; ``[b, j]`` follows sequence b and its first j drafted tokens.
            logits: [B, K+1, V] float; left unchanged.

        Returns:
            [B, K+1, V] float32 probabilities; a greedy row has all its mass on one token. NaN
            where no token is possible: every logit is -inf, or one is NaN or +inf.

        Raises:
            ArgumentError: the logits have another shape, or a biased token is not below V.
        """
        adjusted = self.adjusted(batch, logits)
        parameters = [row.sequence.sampling for row in batch]
        shaped = shaped_probabilities(
            adjusted,
            [one.temperature or 1.0 for one in parameters],
            [one.top_k for one in parameters],
            [one.top_p for one in parameters],
        )
        greedy = [index for index, one in enumerate(parameters) if one.greedy]
        if greedy:
            best = adjusted[greedy].argmax(dim=-1, keepdim=True)
            certain = torch.zeros_like(shaped[greedy]).scatter_(-1, best, 1.0)
            shaped[greedy] = certain.masked_fill_(shaped[greedy].isnan(), torch.nan)
        return shaped

    @torch.no_grad()
    def most_likely(self, batch: Sequence[DraftedSequence], logits: Tensor) -> Tensor:
        """Return the most likely token after bias and penalties, the lowest id where several are.

        Args:
            batch: B rows, as in :meth:`probabilities`.
            logits: [B, K+1, V] float; left unchanged.

        Returns:
            [B, K+1] int64; -1 where no token is possible: every logit is -inf, or one is NaN or
            +inf.

        Raises:
            ArgumentError: as :meth:`probabilities`.
        """
        best, token = self.adjusted(batch, logits).max(dim=-1)
        return torch.where(best.isfinite(), token, -1)

    def adjusted(self, batch: Sequence[DraftedSequence], logits: Tensor) -> Tensor:
        """Return the logits [B, K+1, V] after bias and penalties; ``logits`` where none applies.

        Raises:
            ArgumentError: as :meth:`probabilities`.
        """
        wanted = [len(batch), *logits.shape[1:]]
        check_shape("logits", logits, wanted, "[B, K+1, V] for B rows")
        rows = [i for i, row in enumerate(batch) if row.sequence.sampling.adjusts_logits]
        if not rows:
            return logits
        logits = logits.float().clone()
        chosen = [batch[index] for index in rows]
        changed = apply_logit_bias(
            logits[rows], [row.sequence.sampling.logit_bias for row in chosen]
        )
        counts = TokenCounts.of(chosen, changed.shape[1], changed.shape[2], logits.device)
        parameters = [row.sequence.sampling for row in chosen]
        logits[rows] = apply_penalties(
            changed,
            counts,
            repetition=[one.repetition_penalty for one in parameters],
            frequency=[one.frequency_penalty for one in parameters],
            presence=[one.presence_penalty for one in parameters],
        )
        return logits


def apply_logit_bias(logits: Tensor, biases: Sequence[Mapping[int, float]]) -> Tensor:
    """Add to the logits of named tokens.

    Args:
        logits: [B, J, V] float.
        biases: per row, token id -> number added; -inf forbids the token.

    Returns:
        [B, J, V] of the dtype of ``logits``; a copy.

    Raises:
        ArgumentError: a token id is not below V.
    """
    vocabulary = logits.shape[-1]
    logits = logits.clone()
    for row, bias in enumerate(biases):
        if not bias:
            continue
        if max(bias) >= vocabulary:
            allowed = f"token ids below V = {vocabulary}"
            raise ArgumentError("logit_bias", f"token {max(bias)}", allowed)
        tokens = torch.tensor(list(bias), device=logits.device)
        logits[row, :, tokens] += logits.new_tensor(list(bias.values()))
    return logits


def shaped_probabilities(
    logits: Tensor, temperatures: Sequence[float], top_k: Sequence[int], top_p: Sequence[float]
) -> Tensor:
    """Apply temperature, top-k and top-p of each row, then softmax.

    Args:
        logits: [B, J, V] float; left unchanged.
        temperatures: B numbers > 0.
        top_k: B numbers >= 0; 0 keeps all tokens.
        top_p: B numbers in (0, 1]; 1 keeps all tokens.

    Returns:
        [B, J, V] float32. A row whose logits are all -inf, or hold NaN or +inf, is NaN.
    """
    logits = _scaled(logits.float(), temperatures)
    logits = apply_top_p(apply_top_k(logits, top_k), top_p)
    return logits.softmax(dim=-1)


def apply_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """Set to -inf what is below the k-th largest logit; equals of the k-th largest stay.

    Args:
        logits: [B, J, V] float.
        top_k: B numbers >= 0; 0, or V and more, keeps all tokens.

    Returns:
        [B, J, V]; ``logits`` itself where nothing is cut.
    """
    vocabulary = logits.shape[-1]
    rows = [index for index, k in enumerate(top_k) if 0 < k < vocabulary]
    if not rows:
        return logits
    part = _taken(logits, rows)
    ranks = torch.tensor([top_k[index] - 1 for index in rows], device=logits.device)
    largest = part.topk(max(top_k[index] for index in rows), dim=-1).values
    index = ranks[:, None, None].expand(-1, part.shape[1], 1)
    return _put(logits, rows, part.masked_fill(part < largest.gather(-1, index), -torch.inf))


def apply_top_p(logits: Tensor, top_p: Sequence[float]) -> Tensor:
    """Set to -inf the least likely tokens that together have at most 1 - p.

    The rest is the smallest set of most likely tokens with a probability of p or more; at least
    one token stays. Of equally likely tokens at the border those with the lowest ids go (vLLM and
    transformers leave that to a sort that is not stable).

    Args:
        logits: [B, J, V] float.
        top_p: B numbers in (0, 1]; 1 keeps all tokens.

    Returns:
        [B, J, V]; ``logits`` itself where nothing is cut.
    """
    rows = [index for index, p in enumerate(top_p) if p < 1]
    if not rows:
        return logits
    part = _taken(logits, rows)
    ordered, tokens = _ascending(part)
    limits = 1 - torch.tensor([top_p[index] for index in rows], device=logits.device)
    cut = ordered.softmax(dim=-1).cumsum(dim=-1) <= limits[:, None, None]
    cut[..., -1] = False
    kept = torch.full_like(part, -torch.inf)
    return _put(logits, rows, kept.scatter(-1, tokens, ordered.masked_fill(cut, -torch.inf)))


def _scaled(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    if all(one == 1 for one in temperatures):
        return logits
    if min(temperatures) < _TINY_TEMPERATURE:
        logits = logits - logits.amax(dim=-1, keepdim=True)
    return logits / logits.new_tensor(temperatures)[:, None, None]


def _ascending(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the last dimension, equals by id; after top-k only what it left is sorted."""
    most = logits.shape[-1]
    if logits.device.type == "cpu":
        most = max(1, int((logits > -torch.inf).sum(dim=-1).max()))
    if most > logits.shape[-1] // 4:
        ordered = logits.sort(dim=-1, stable=True)
        return ordered.values, ordered.indices
    # By id first, so that the stable sort by logit finds equals in the order of their ids.
    tokens = logits.topk(most, dim=-1).indices.sort(dim=-1).values
    ordered = logits.gather(-1, tokens).sort(dim=-1, stable=True)
    return ordered.values, tokens.gather(-1, ordered.indices)


def _taken(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits if len(rows) == logits.shape[0] else logits[list(rows)]


def _put(logits: Tensor, rows: Sequence[int], part: Tensor) -> Tensor:
    if len(rows) == logits.shape[0]:
        return part
    return logits.index_copy(0, torch.tensor(rows, device=logits.device), part)
