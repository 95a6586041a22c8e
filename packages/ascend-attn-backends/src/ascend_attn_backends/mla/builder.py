"""Builds the latent backend's metadata, once per step."""

from __future__ import annotations

import attrs

from ..batch import AttentionBatch
from ..partial_metadata import PartialMetadataBuilder
from ..standard.builder import host_key_counts
from .metadata import AscendMLAMetadata


@attrs.frozen
class AscendMLAMetadataBuilder(PartialMetadataBuilder):
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
        return AscendMLAMetadata(**self._partial_fields(batch, host_key_counts(batch)))
