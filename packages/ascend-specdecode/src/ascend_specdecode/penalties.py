"""Penalties for tokens that a request already has in its prompt or output."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascend_specdecode.protocols import DraftedSequence


@attrs.frozen(eq=False)
class TokenCounts:
    """What each row holds before the token that is scored.

    Attributes:
        output: [B, J, V] float32, how often each token is in the output, the drafted tokens before
            this place (in a tree: above it) included.
        prompt: [B, 1, V] bool, which tokens are in the prompt.
    """

    output: Tensor
    prompt: Tensor

    @classmethod
    def of(
        cls,
        batch: Sequence[DraftedSequence],
        width: int,
        vocabulary: int,
        device: torch.device,
    ) -> TokenCounts:
        """Count the tokens of B rows for ``width`` places; ids of V and above are not counted."""
        output = np.zeros((len(batch), width, vocabulary), dtype=np.float32)
        prompt = np.zeros((len(batch), 1, vocabulary), dtype=bool)
        for index, row in enumerate(batch):
            tokens, split = row.sequence.verified, row.sequence.prompt_length
            output[index, 0] = _counts(tokens[split:], vocabulary)
            prompt[index, 0] = _counts(tokens[:split], vocabulary) > 0
            parents = row.proposal.parents
            for node, token in enumerate(row.proposal.tokens[: width - 1]):
                before = node if parents is None else parents[node] + 1
                output[index, node + 1] = output[index, before]
                output[index, node + 1, token] += 1
        return cls(torch.from_numpy(output).to(device), torch.from_numpy(prompt).to(device))


def apply_penalties(
    logits: Tensor,
    counts: TokenCounts,
    *,
    repetition: Sequence[float],
    frequency: Sequence[float],
    presence: Sequence[float],
) -> Tensor:
    """Make tokens less (or more) likely that the row has already.

    Repetition (Keskar et al. 2019, CTRL): the logit of a token of prompt or output is divided by
    the penalty where positive, multiplied where negative. Frequency and presence (OpenAI API):
    subtracted from the logit of a token of the output, per occurrence and once.

    Args:
        logits: [B, J, V] float.
        counts: what the rows hold.
        repetition: B numbers > 0; 1 is none.
        frequency: B numbers; 0 is none.
        presence: B numbers; 0 is none.

    Returns:
        [B, J, V], a new tensor.
    """
    said = counts.output > 0
    factor = logits.new_tensor(repetition)[:, None, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(said | counts.prompt, repeated, logits)
    logits = logits - logits.new_tensor(frequency)[:, None, None] * counts.output
    return logits - logits.new_tensor(presence)[:, None, None] * said


def _counts(tokens: NDArray[np.int64], vocabulary: int) -> NDArray[np.int64]:
    return np.bincount(tokens, minlength=vocabulary)[:vocabulary]
