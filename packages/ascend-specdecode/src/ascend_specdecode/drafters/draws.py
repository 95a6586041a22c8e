"""Choosing drafted tokens from a draft model's logits."""

from __future__ import annotations

from collections.abc import Sequence

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
        best, tokens = logits.max(dim=-1)
        bad = (~best.isfinite()).tolist()
        if any(bad):
            pairs = zip(sequences, bad, strict=True)
            named = [sequence.sequence_id for sequence, is_bad in pairs if is_bad]
            raise DrafterError("the draft model's logits are NaN, +inf or only -inf", named)
        probabilities: dict[int, Tensor] = {}
        rows = [b for b, one in enumerate(sequences) if self.sampled and not one.sampling.greedy]
        if rows:
            given = _shaped([sequences[row].sampling for row in rows], logits[rows])
            seeds = torch.tensor([sequences[row].seed for row in rows], device=logits.device)
            places = torch.tensor([positions[row] for row in rows], device=logits.device)
            numbers = uniforms(seeds, places, Purpose.DRAFT)
            tokens = tokens.clone()
            tokens[rows] = inverse_cdf(given, numbers)
            wide = given if self.vocabulary is None else self.vocabulary.probabilities(given)
            probabilities = dict(zip(rows, wide, strict=True))
        if self.vocabulary is not None:
            tokens = self.vocabulary.tokens(tokens)
        return [(token, probabilities.get(row)) for row, token in enumerate(tokens.tolist())]


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
