"""Builds the latent backend's metadata, once per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ..batch import AttentionBatch
from ..standard import AscendAttentionMetadataBuilder
from ..standard.builder import covered_starts, host_key_counts
from ..transfer import copy_to_device
from .metadata import AscendMLAMetadata


@attrs.frozen
class AscendMLAMetadataBuilder(AscendAttentionMetadataBuilder):
    """A pure function from batch to metadata.

    The operator is the one of the standard backend, with ropes, so it takes the same host lengths.
    Prefill, chunks, decode and verification need no split: one call takes all rows.

    Attributes:
        block_size: Tokens per cache block.
        masks: Where the mask template comes from; by default one template per device and process.
    """

    def build(self, batch: AttentionBatch) -> AscendMLAMetadata:
        """Metadata of one step; nothing in it aliases the batch.

        Raises:
            AttentionBatchError: The block table has fewer columns than a request has blocks.
        """
        return AscendMLAMetadata(**self._latent_fields(batch, host_key_counts(batch)))

    def _latent_fields(self, batch: AttentionBatch, keys: list[int]) -> dict[str, Any]:
        """The fields of an :class:`AscendMLAMetadata` when each request attends over ``keys``."""
        keyless = None if all(keys) else _keyless_tokens(batch, keys)
        return {**self._fields(batch, keys), "keyless_tokens": keyless}


def _keyless_tokens(batch: AttentionBatch, keys: Sequence[int]) -> torch.Tensor | None:
    lens = torch.tensor(covered_starts(batch)).diff()
    keyless = torch.repeat_interleave(torch.tensor(keys, dtype=torch.int64) == 0, lens)
    return copy_to_device(keyless, batch.device) if keyless.any() else None
