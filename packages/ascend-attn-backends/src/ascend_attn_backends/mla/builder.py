"""Builds the latent backend's metadata, once per step."""

from __future__ import annotations

import attrs

from ..batch import AttentionBatch
from ..open_tokens import OpenTokens
from ..partial_metadata import PartialMetadataBuilder
from ..standard.builder import host_key_counts
from .all_keys import all_keys_step
from .metadata import AscendMLAMetadata


@attrs.frozen
class AscendMLAMetadataBuilder(PartialMetadataBuilder):
    """A pure function from batch to metadata.

    The operator is the one of the standard backend, with ropes, so it takes the same host lengths,
    unless the batch has bounds: see :meth:`build`. Prefill, chunks, decode and verification need no
    split: one call takes all rows.

    Attributes:
        block_size: Tokens per cache block.
        masks: Where the mask template comes from; by default one template per device and process.
    """

    def build(self, batch: AttentionBatch) -> AscendMLAMetadata:
        """Metadata of one step; nothing in it aliases the batch.

        Where the batch has bounds instead of host lengths (``seq_lens_cpu_upper_bound``) nothing is
        read: sparse_flash_attention computes requests of unknown length with every key chosen, see
        :class:`AllKeysStep`. Where ``is_prefilling``, the bound is the length. A step in which
        another request has more than 16 tokens, or whose indices would be larger than 256 MiB,
        reads its lengths, and so does one whose requests differ in causality.

        Raises:
            AttentionBatchError: The block table has fewer columns than a request has blocks.
        """
        opened = OpenTokens.of(batch, self._room(batch))
        if opened is not None:
            chosen = all_keys_step(batch, self.block_size, opened) if opened.num_tokens else None
            if chosen is not None or not opened.num_tokens:
                fields = self._open_fields(batch, opened)
                return AscendMLAMetadata(**fields, keyless_tokens=None, all_keys=chosen)
        return AscendMLAMetadata(**self._partial_fields(batch, host_key_counts(batch)))
