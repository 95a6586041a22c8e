"""Builds the indexer's metadata, once per step."""

from __future__ import annotations

import attrs

from ..batch import AttentionBatch
from ..paged_step import PagedStepBuilder
from .metadata import AscendSFAIndexerMetadata


@attrs.frozen
class AscendSFAIndexerMetadataBuilder(PagedStepBuilder):
    """A pure function from batch to metadata that never reads a device tensor.

    The index cache may lie in other blocks than the latent cache, hence a builder of its own.

    Attributes:
        block_size: Tokens per logical block of the index cache.
        kernel_block_size: Tokens per block that the operator sees; None takes the largest.
    """

    def build(self, batch: AttentionBatch) -> AscendSFAIndexerMetadata:
        """Metadata of one step; nothing in it aliases the batch.

        Raises:
            AttentionBatchError: See :meth:`PagedStepBuilder.fields`.
            InvalidFieldError: The kernel block does not divide the block.
        """
        batch.validate_in_debug(self.block_size)
        return AscendSFAIndexerMetadata(**self.fields(batch))
