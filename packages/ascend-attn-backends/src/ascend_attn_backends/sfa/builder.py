"""Builds the sparse latent backend's metadata, once per step."""

from __future__ import annotations

import attrs

from ..batch import AttentionBatch
from ..paged_step import PagedStepBuilder
from .metadata import AscendSFAMetadata


@attrs.frozen
class AscendSFAMetadataBuilder(PagedStepBuilder):
    """A pure function from batch to metadata that never reads a device tensor.

    Prefill, chunks, decode and verification need no split: one call takes all rows.

    Attributes:
        block_size: Tokens per logical block of the cache.
        kernel_block_size: Tokens per block that the operator sees; None takes the largest.
    """

    def build(self, batch: AttentionBatch) -> AscendSFAMetadata:
        """Metadata of one step; nothing in it aliases the batch.

        Raises:
            AttentionBatchError: See :meth:`PagedStepBuilder.fields`.
            InvalidFieldError: The kernel block does not divide the block.
        """
        batch.validate_in_debug(self.block_size)
        return AscendSFAMetadata(**self.fields(batch))
