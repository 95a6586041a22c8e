"""Metadata of backends whose results are merged with other parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ascend_attn_ops import PartialAttention

from .batch import AttentionBatch
from .standard.builder import AscendAttentionMetadataBuilder, covered_starts
from .standard.metadata import AscendMetadata
from .transfer import copy_to_device


@attrs.frozen(eq=False, kw_only=True)
class PartialMetadata(AscendMetadata):
    """Metadata of one step; see :class:`AscendMetadata` for the other fields.

    Attributes:
        keyless_tokens: ``[num_tokens]`` bool on the device, the tokens of requests without any key;
            None when there are none. What an operator returns for them is not read: some return a
            finite lse or NaN there.
    """

    keyless_tokens: torch.Tensor | None

    def neutral(self, part: PartialAttention) -> PartialAttention:
        """``part`` with out 0 and lse -inf where a request has no key, by its length alone."""
        if self.keyless_tokens is None:
            return part
        return PartialAttention(
            part.out.masked_fill(self.keyless_tokens[:, None, None], 0.0),
            part.lse.masked_fill(self.keyless_tokens[:, None], float("-inf")),
        )


@attrs.frozen
class PartialMetadataBuilder(AscendAttentionMetadataBuilder):
    """Builds the fields of :class:`PartialMetadata`; see the base class for its attributes."""

    def _partial_fields(self, batch: AttentionBatch, keys: list[int]) -> dict[str, Any]:
        """The fields when each request attends over ``keys``."""
        keyless = None if all(keys) else _keyless_tokens(batch, keys)
        return {**self._fields(batch, keys), "keyless_tokens": keyless}


def _keyless_tokens(batch: AttentionBatch, keys: Sequence[int]) -> torch.Tensor | None:
    lens = torch.tensor(covered_starts(batch)).diff()
    keyless = torch.repeat_interleave(torch.tensor(keys, dtype=torch.int64) == 0, lens)
    return copy_to_device(keyless, batch.device) if keyless.any() else None
