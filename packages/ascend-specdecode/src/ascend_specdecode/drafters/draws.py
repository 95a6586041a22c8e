"""Choosing drafted tokens from a draft model's logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ascend_specdecode.choices import inverse_cdf
from ascend_specdecode.drafters.vocabulary import DraftVocabulary
from ascend_specdecode.errors import DrafterError
from ascend_specdecode.parameters import SamplingParameters
from ascend_specdecode.protocols import Proposal
from ascend_specdecode.random_streams import Purpose, uniforms
from ascend_specdecode.sampling import shaped_probabilities
from ascend_specdecode.sequences import SequenceState

_SMALLEST: Final = 1e-30


@attrs.frozen
class DraftDraws:
    """How drafted tokens are drawn.

    Attributes:
        sampled: True: a request with a temperature gets tokens sampled at its temperature, top-k
            and top-p, with their probabilities, which is accepted more. False: it gets the most
            likely tokens, as point masses, which is cheaper. A greedy request always gets these.
        vocabulary: the map of a reduced draft vocabulary; None where the draft has the target's.
    """

    sampled: bool = True
    vocabulary: DraftVocabulary | None = None

    @torch.no_grad()
    def draw(
        self, sequences: Sequence[SequenceState], positions: Sequence[int], logits: Tensor
    ) -> list[tuple[int, Tensor | None]]:
        """Draw one token per sequence.

        Args:
            sequences: B sequences.
            positions: index of the drawn token in each sequence.
            logits: [B, D] float, D the draft's vocabulary.

        Returns:
            Per sequence the token, an id of the target, and the distribution [V] that it was
            sampled from; None for the most likely token.

        Raises:
            DrafterError: names the sequences whose logits are NaN or leave no token.
        """
        return [row[0] for row in self.draw_siblings(sequences, positions, logits, 1)]

    @torch.no_grad()
    def draw_siblings(
        self,
        sequences: Sequence[SequenceState],
        positions: Sequence[int],
        logits: Tensor,
        count: int,
    ) -> list[list[tuple[int, Tensor | None]]]:
        """Draw up to ``count`` (>= 1) different tokens per sequence, for the same place of a tree.

        Args:
            sequences: B sequences.
            positions: index of the drawn tokens in each sequence.
            logits: [B, D] float, D the draft's vocabulary.
            count: how many.

        Returns:
            Per sequence what :meth:`draw` returns for each of them, in the order drawn; the
            distribution is without the tokens drawn before. Fewer where no other token is possible.

        Raises:
            DrafterError: as :meth:`draw`.
        """
        _refuse_impossible(sequences, logits)
        rows = [b for b, one in enumerate(sequences) if self.sampled and not one.sampling.greedy]
        given = _shaped([sequences[row].sampling for row in rows], logits[rows]) if rows else None
        found: list[list[tuple[int, Tensor | None]]] = [[] for _ in sequences]
        for rank in range(count):
            best, tokens = logits.max(dim=-1)
            possible = best.isfinite()
            if given is not None:
                seeds = torch.tensor([sequences[row].seed for row in rows], device=logits.device)
                places = torch.tensor([positions[row] for row in rows], device=logits.device)
                tokens = tokens.clone()
                tokens[rows] = inverse_cdf(given, uniforms(seeds, places, Purpose.DRAFT, rank))
                possible[rows] = given.sum(dim=-1) > 0
            self._append(found, possible, tokens, dict(zip(rows, _or_none(given), strict=True)))
            if rank + 1 < count:
                logits = logits.scatter(1, tokens.unsqueeze(1), -torch.inf)
                given = None if given is None else _without(given, tokens[rows])
        return found

    def _append(
        self,
        found: list[list[tuple[int, Tensor | None]]],
        possible: Tensor,
        tokens: Tensor,
        probabilities: Mapping[int, Tensor],
    ) -> None:
        """Add the drawn tokens [B] of rows where one was possible, as the target knows them."""
        if self.vocabulary is not None:
            probabilities = {
                row: self.vocabulary.probabilities(own.unsqueeze(0))[0]
                for row, own in probabilities.items()
            }
            tokens = self.vocabulary.tokens(tokens)
        pairs = zip(tokens.tolist(), possible.tolist(), strict=True)
        for row, (token, is_possible) in enumerate(pairs):
            if is_possible:
                found[row].append((token, probabilities.get(row)))


def _refuse_impossible(sequences: Sequence[SequenceState], logits: Tensor) -> None:
    bad = (~logits.amax(dim=-1).isfinite()).tolist()
    if any(bad):
        pairs = zip(sequences, bad, strict=True)
        named = [sequence.sequence_id for sequence, is_bad in pairs if is_bad]
        raise DrafterError("the draft model's logits are NaN, +inf or only -inf", named)


def _or_none(given: Tensor | None) -> Iterable[Tensor]:
    return () if given is None else given


def _without(given: Tensor, tokens: Tensor) -> Tensor:
    """Return the distributions [R, D] without these tokens [R]; zeros where no other is left."""
    left = given.scatter(1, tokens.unsqueeze(1), 0.0)
    return left / left.sum(dim=-1, keepdim=True).clamp(min=_SMALLEST)


def _shaped(parameters: Sequence[SamplingParameters], logits: Tensor) -> Tensor:
    """Return [R, D] probabilities at the temperature, top-k and top-p of each row."""
    return shaped_probabilities(
        logits.unsqueeze(1),
        [one.temperature for one in parameters],
        [one.top_k for one in parameters],
        [one.top_p for one in parameters],
    )[:, 0]


def as_proposal(drawn: Sequence[tuple[int, Tensor | None]]) -> Proposal:
    """Return drawn tokens of one sequence with their probabilities, where all have them."""
    tokens = tuple(token for token, _ in drawn)
    rows = [row for _, row in drawn if row is not None]
    return Proposal(tokens, torch.stack(rows) if rows and len(rows) == len(tokens) else None)


def as_tree(levels: Sequence[Sequence[tuple[int, Tensor | None]]], k: int) -> Proposal:
    """Return siblings per place as a tree: the first of each place are the path, then the others.

    Args:
        levels: for each place after the sequence the tokens drawn there, see
            :meth:`DraftDraws.draw_siblings`.
        k: most tokens; more siblings, those of the last places, are left out.
    """
    nodes = [(level[0], place - 1) for place, level in enumerate(levels)]
    nodes += [(one, place - 1) for place, level in enumerate(levels) for one in level[1:]]
    chosen = as_proposal([one for one, _ in nodes[:k]])
    return attrs.evolve(chosen, parents=tuple(parent for _, parent in nodes[:k]))
