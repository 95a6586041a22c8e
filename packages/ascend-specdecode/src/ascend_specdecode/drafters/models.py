"""What drafters ask of a draft model: one small call, batched, with state kept by length.

The three kinds differ only in what goes in and comes out of a call. All of them get, per sequence,
the tokens (and hidden states) of consecutive positions. State that the model holds for positions
from ``start`` on is of rejected tokens and is overwritten; state before ``start`` is valid. So
there is nothing to roll back and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@attrs.frozen(eq=False)
class DraftInput:
    """What a draft model computes for one sequence.

    Attributes:
        sequence_id: whose state is read and written.
        start: first position that is computed; the model holds state for those before it.
        tokens: [N], N >= 1, ids >= 0. Without hidden states: the tokens at positions
            start..start+N-1. With them, shifted left by one: position p is computed from the hidden
            state at p and the token at p + 1, as MTP and EAGLE layers are trained.
        hidden_states: [N, H] at positions start..start+N-1; None for models that read none.
    """

    sequence_id: int
    start: int
    tokens: NDArray[np.int64]
    hidden_states: Tensor | None = None

    @property
    def end(self) -> int:
        """The position after the last one that is computed."""
        return self.start + len(self.tokens)


@attrs.frozen(eq=False)
class DraftOutput:
    """What a model that reads hidden states returns for B rows.

    Attributes:
        logits: [B, V] float, after the last position of each row.
        hidden_states: [B, H], the model's own at that position, in the place of the target's.
    """

    logits: Tensor
    hidden_states: Tensor


class _KeepsState(Protocol):
    def free(self, sequence_id: int) -> None:
        """Drop all state of a sequence, known or not."""
        ...


class DraftModel(_KeepsState, Protocol):
    """A causal language model."""

    async def next_logits(self, rows: Sequence[DraftInput]) -> Tensor:
        """Compute the rows; return the logits after each row's last token: [B, V] float."""
        ...


class HiddenStateModel(_KeepsState, Protocol):
    """A draft layer on top of the target's hidden states (MTP, EAGLE)."""

    async def next_output(self, rows: Sequence[DraftInput]) -> DraftOutput:
        """Compute the rows; return logits and hidden state of each row's last position."""
        ...


class BlockModel(_KeepsState, Protocol):
    """A model that drafts a block of tokens in one call (DFlash, Medusa heads)."""

    @property
    def block_size(self) -> int:
        """Most tokens that one call drafts."""
        ...

    async def block_logits(self, rows: Sequence[DraftInput], k: int) -> Tensor:
        """Compute the rows; return logits for the k tokens after each row: [B, k, V] float.

        A row's last token is the last one of its sequence; the k tokens follow it. The distribution
        of each does not depend on the others of the block. With k = 0 the rows are read, no more.
        """
        ...
