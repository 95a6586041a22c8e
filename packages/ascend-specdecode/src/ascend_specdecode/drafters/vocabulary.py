"""Draft heads with a reduced vocabulary."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from ascend_specdecode.errors import ArgumentError


@attrs.frozen(eq=False)
class DraftVocabulary:
    """How the ids of a draft head with fewer tokens than the target map to the target's.

    Attributes:
        target_ids: [D] int64, the target's id of each draft id; each once.
        target_size: V, tokens of the target's vocabulary.

    Raises:
        ArgumentError: an id is outside 0..V-1 or there twice.
    """

    target_ids: Tensor
    target_size: int

    def __attrs_post_init__(self) -> None:
        ids = self.target_ids
        if ids.dim() != 1 or ids.dtype != torch.int64 or not len(ids):
            found = f"shape {list(ids.shape)}, {ids.dtype}"
            raise ArgumentError("target_ids", found, "shape [D] with D >= 1, torch.int64")
        if int(ids.min()) < 0 or int(ids.max()) >= self.target_size:
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ArgumentError("target_ids", wrong, f"token ids 0..V-1 (V = {self.target_size})")
        if len(ids.unique()) != len(ids):
            raise ArgumentError("target_ids", "an id twice", "each id once")

    @classmethod
    def from_d2t(cls, d2t: Tensor, target_size: int) -> DraftVocabulary:
        """Return the map of an EAGLE-3 checkpoint: ``target id = draft id + d2t[draft id]``.

        Args:
            d2t: [D] int, the checkpoint's tensor of that name.
            target_size: V, tokens of the target's vocabulary.

        Raises:
            ArgumentError: as the class.
        """
        return cls(torch.arange(len(d2t), device=d2t.device) + d2t.long(), target_size)

    def tokens(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids of draft ids: any shape, int64."""
        return self.target_ids[draft_ids]

    def probabilities(self, draft_probs: Tensor) -> Tensor:
        """Return [..., V] of [..., D]: a token that the draft head lacks has probability 0.

        Raises:
            ArgumentError: the last dimension is not D.
        """
        wanted = len(self.target_ids)
        if draft_probs.shape[-1] != wanted:
            found = f"{draft_probs.shape[-1]} logits per token"
            raise ArgumentError("draft logits", found, f"{wanted}, one for each draft id")
        out = draft_probs.new_zeros(*draft_probs.shape[:-1], self.target_size)
        out[..., self.target_ids] = draft_probs
        return out
