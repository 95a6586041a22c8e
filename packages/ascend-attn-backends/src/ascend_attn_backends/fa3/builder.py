"""Builds the FA3 backend's metadata, once per step."""

from __future__ import annotations

import attrs
import torch

from .._batch_checks import check_width
from ..batch import AttentionBatch
from ..errors import AttentionBatchError
from ..starts import repair_starts
from .metadata import AscendFAMetadata


@attrs.frozen
class AscendFAMetadataBuilder:
    """A pure function from batch to metadata that never reads a device tensor.

    Query starts pass through :func:`repair_starts`; key counts are held between 0 and what the row
    of the block table can address, so that a stale length never reads the next row.

    Attributes:
        block_size: Tokens per cache block.
    """

    block_size: int = attrs.field(validator=attrs.validators.ge(1))

    def build(self, batch: AttentionBatch) -> AscendFAMetadata:
        """Metadata of one step; nothing in it aliases the batch.

        Raises:
            AttentionBatchError: Causality differs between requests (the function takes one value),
                or the block table has fewer columns than a request (by its host length) has blocks.
        """
        batch.validate_in_debug(self.block_size)
        if not isinstance(batch.causal, bool):
            raise AttentionBatchError("causal", "one value per request", "one value for all")
        rows = batch.num_reqs
        if batch.seq_lens_cpu is not None:
            check_width(batch.block_table, batch.seq_lens_cpu[:rows], self.block_size)
        room = batch.block_table.shape[1] * self.block_size
        return AscendFAMetadata(
            num_reqs=rows,
            num_tokens=batch.num_tokens,
            block_size=self.block_size,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            causal=batch.causal,
            query_starts=repair_starts(batch.query_start_loc[: rows + 1], batch.num_tokens),
            seq_lens=batch.seq_lens[:rows].clamp(0, room),
            block_table=batch.block_table[:rows].clone(memory_format=torch.contiguous_format),
            slot_mapping=batch.slot_mapping.clone(),
        )
