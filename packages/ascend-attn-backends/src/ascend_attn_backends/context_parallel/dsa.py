"""Decode context parallelism of the compressed backend.

What grows with a request is shared, what does not is on every rank:

- compressed keys, and index keys beside them: shared. Key number g (not the position of a token)
  lives on rank ``(g // interleave) % size``.
- the sliding window: on every rank. It has a fixed number of keys, so sharing it would save next
  to nothing and need a mask per shard. Each rank attends over it with its own heads.
- the states of the compressors: on every rank. A key needs the state of a whole group of tokens,
  and no more than two groups are kept; all ranks have the hidden states of all tokens anyway.

So each rank makes all keys and writes its own. A layer with the window alone exchanges nothing.
"""

from __future__ import annotations

import attrs
import torch

from ascend_attn_ops import PartialAttention, merge_partials

from ..batch import AttentionBatch
from ..dsa import (
    AscendDSAImpl,
    AscendDSAMetadata,
    AscendDSAMetadataBuilder,
    CompressedStep,
    CompressorRows,
    DsaCompression,
    DsaTables,
)
from ..dsa.compression import INDEX_SIZE, KEY_SIZE
from ..dsa.steps import compressor_rows, repeated_tokens
from ..errors import AttentionBatchError, InvalidFieldError
from ..kv_layout import PAD_SLOT, num_blocks_for
from ..paged_step import PagedStep
from .common import AscendDCPMetadata, DCPImplMixin, DCPMetadataBuilderMixin, Tensors
from .group import DCPGroup, group_or_alone
from .sfa import local_choice
from .sfa_indexer import AscendSFAIndexerDCPImpl, AscendSFAIndexerDCPMetadata
from .tokens import visible_keys


@attrs.frozen(eq=False, kw_only=True)
class AscendDSADCPMetadata(AscendDSAMetadata):
    """Metadata of one step on one rank, for layers of one kind.

    The fields of :class:`AscendDSAMetadata` speak of the sliding window alone, which every rank
    has.

    Attributes:
        shared: The step over this rank's compressed keys, each token a request of its own; None for
            layers with the window alone. Its ``compressed.compressor`` is the call that makes all
            keys of the step, with slots for those of this rank.
        index: The step over this rank's index keys; None where all keys are attended to.
        dcp: How this step is shared.
    """

    shared: AscendDSAMetadata | None
    index: AscendSFAIndexerDCPMetadata | None
    dcp: AscendDCPMetadata

    @property
    def for_compressor(self) -> AscendDSAMetadata:
        """What :class:`AscendDSACompressor` takes."""
        return self if self.shared is None else self.shared


@attrs.frozen
class AscendDSADCPMetadataBuilder(DCPMetadataBuilderMixin, AscendDSAMetadataBuilder):
    """A pure function from batch and tables to metadata, on one rank; reads no device tensor.

    See :class:`AscendDSAMetadataBuilder` for the other attributes.

    Attributes:
        num_heads: Query heads on this rank, N / size.
        shard: This rank's share of the compressed keys.
    """

    def build(self, batch: AttentionBatch, tables: DsaTables | None = None) -> AscendDSADCPMetadata:
        """Metadata of one step; nothing in it aliases the batch or the tables.

        Args:
            batch: The step; its block table and slots are those of the window's cache, which holds
                all tokens on every rank.
            tables: Blocks of this rank's own compressed keys, and of the states; None for the
                window alone.

        Raises:
            AttentionBatchError: See :meth:`AscendDSAMetadataBuilder.build`.
            InvalidFieldError: The batch is not causal, or tables are missing, superfluous or of
                another form.
        """
        if (tables is None) != (self.compression is None):
            allowed = "None for the window alone" if self.compression is None else "DsaTables"
            raise InvalidFieldError("tables", type(tables).__name__, allowed)
        batch.validate_in_debug(self.block_size)
        window, dcp = self._window_builder().build(batch), self.dcp_metadata(batch)
        shared = index = None
        if self.compression is not None and tables is not None and not window.is_empty:
            shared = self._shared(batch, window, tables, self.compression)
            index = _index_step(shared, dcp) if self.compression.overlap else None
        fields = attrs.asdict(window, recurse=False)
        return AscendDSADCPMetadata(**fields, shared=shared, index=index, dcp=dcp)

    def _window_builder(self) -> AscendDSAMetadataBuilder:
        return AscendDSAMetadataBuilder(
            self.block_size,
            kernel_block_size=self.kernel_block_size,
            num_heads=self.num_heads,
            window=self.window,
            head_size=self.head_size,
        )

    def _shared(
        self,
        batch: AttentionBatch,
        window: AscendDSAMetadata,
        tables: DsaTables,
        compression: DsaCompression,
    ) -> AscendDSAMetadata:
        """The step in which each token sees its compressed keys of this rank, and no window."""
        size = self.compressed_block_size
        rows, visible = visible_keys(batch, batch.query_start_loc, batch.seq_lens, causal=True)
        own = self.shard.local_counts(torch.div(visible, compression.ratio, rounding_mode="floor"))
        table = tables.compressed.index_select(0, rows)
        compressed = CompressedStep(
            compression=compression,
            block_size=size,
            block_table=table,
            key_lens=own.clamp(max=table.shape[1] * size).int(),
            residual_lens=torch.zeros_like(own, dtype=torch.int32),
            compressor=self._compressor(batch, window, tables, compression),
            index=None,
        )
        step = self._token_step(window, rows)
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        heads = attrs.evolve(self, num_heads=self.num_heads * self.shard.size)
        return AscendDSAMetadata(
            **attrs.asdict(step, recurse=False),
            query_starts=starts,
            window=self.window,
            compressed=compressed,
            plan=heads._plan(step, starts, compressed),
        )

    def _token_step(self, window: AscendDSAMetadata, rows: torch.Tensor) -> PagedStep:
        """Each token as a request without keys in the window."""
        count = len(rows)
        ends = torch.arange(1, count + 1, dtype=torch.int32, device=rows.device)
        return PagedStep(
            num_reqs=count,
            num_tokens=count,
            max_query_len=1,
            max_seq_len=window.max_seq_len,
            causal=True,
            block_size=window.block_size,
            kernel_block_size=window.kernel_block_size,
            query_ends=ends,
            seq_lens=torch.zeros_like(ends),
            block_table=window.block_table[:, :1].index_select(0, rows),
            slot_mapping=window.slot_mapping,
        )

    def _compressor(
        self,
        batch: AttentionBatch,
        step: PagedStep,
        tables: DsaTables,
        compression: DsaCompression,
    ) -> CompressorRows:
        """The call for all keys of the step, with slots for those of this rank.

        The keys get slots in blocks of their own first, from which request and number of a key can
        be told; these give its place on this rank.
        """
        self._check_key_blocks(batch, tables, compression)
        size, width = self.compressed_block_size, tables.compressed.shape[1]
        cycle = self.shard.size * self.shard.interleave
        columns = width * self.shard.size + num_blocks_for(cycle, size)
        numbered = torch.arange(step.num_reqs * columns, device=batch.device, dtype=torch.int32)
        numbered = numbered.view(step.num_reqs, columns)
        whole = attrs.evolve(tables, compressed=numbered)
        whole.check(batch, compression.ratio, size, self.state_block_size)
        repeated = repeated_tokens(batch, compression, self.num_spec_tokens)
        rows = compressor_rows(step, whole, compression, size, repeated)
        request = torch.div(rows.key_slots, columns * size, rounding_mode="floor").clamp(min=0)
        number = rows.key_slots.remainder(columns * size)
        place = self.shard.local_positions(number)
        column = torch.div(place, size, rounding_mode="floor")
        block = tables.compressed[request, column.clamp(max=width - 1)].long()
        written = (rows.key_slots >= 0) & self.shard.owns(number) & (column < width)
        slots = (block * size + place.remainder(size)).where(written, PAD_SLOT)
        return attrs.evolve(rows, key_slots=slots)

    def _check_key_blocks(
        self, batch: AttentionBatch, tables: DsaTables, compression: DsaCompression
    ) -> None:
        if tables.compressed.dim() != 2:
            raise InvalidFieldError("tables.compressed", list(tables.compressed.shape), "rank 2")
        if batch.seq_lens_cpu is None:
            return
        longest = batch.seq_lens_cpu[: batch.num_reqs].max() // compression.ratio
        own = int(attrs.evolve(self.shard, rank=0).local_counts(longest))
        needed, width = num_blocks_for(own, self.compressed_block_size), tables.compressed.shape[1]
        if needed > width:
            raise AttentionBatchError(
                "tables.compressed",
                f"{width} columns",
                f"at least {needed}, for {own} keys in blocks of {self.compressed_block_size}",
            )


def _index_step(shared: AscendDSAMetadata, dcp: AscendDCPMetadata) -> AscendSFAIndexerDCPMetadata:
    """The same rows over the index keys, which lie in the blocks of the compressed keys."""
    compressed = shared.compressed
    assert compressed is not None  # noqa: S101 - made beside it
    return AscendSFAIndexerDCPMetadata(
        num_reqs=shared.num_reqs,
        num_tokens=shared.num_tokens,
        max_query_len=1,
        max_seq_len=shared.max_seq_len,
        causal=False,
        block_size=compressed.block_size,
        kernel_block_size=compressed.block_size,
        query_ends=shared.query_ends,
        seq_lens=compressed.key_lens,
        block_table=compressed.block_table,
        slot_mapping=shared.slot_mapping,
        dcp=dcp,
    )


class AscendDSAIndexerDCPImpl:
    """Choice of compressed keys for each token of one layer, whose index keys ranks share.

    Args:
        num_heads: Index heads of the layer; every rank has all of them.
        compression: Of the layer; its ``top_k`` is the number of keys that a token attends to.
        dcp_group: The ranks; None means this one alone.
        index_size: Elements of an index key; products take 128.

    Raises:
        InvalidFieldError: A count is not positive, or the layer attends to all keys.
    """

    def __init__(
        self,
        num_heads: int,
        compression: DsaCompression,
        dcp_group: DCPGroup | None = None,
        index_size: int = INDEX_SIZE,
    ) -> None:
        if compression.top_k is None:
            raise InvalidFieldError("compression.top_k", None, "a number of keys")
        self.top_k = compression.top_k
        self._indexer = AscendSFAIndexerDCPImpl(num_heads, self.top_k, dcp_group, index_size)

    def scaled_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights * num_heads ** -0.5 * index_size ** -0.5``, as DeepSeek-V4 uses it."""
        return self._indexer.scaled_weights(weights)

    def forward(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        index_cache: torch.Tensor,
        metadata: AscendDSADCPMetadata,
    ) -> torch.Tensor:
        """The best compressed keys of each real token; every rank must call it.

        Args:
            query: ``[T or more, num_heads, 128]`` rotated index queries, the same on every rank.
            weights: ``[T or more, num_heads]`` weight of each head, scaled.
            index_cache: ``[num_blocks, 1, block_size, 128]`` view of this rank's cache that holds
                its keys of this step too.
            metadata: Of this step on this rank.

        Returns:
            ``[T, 1, top_k]`` int32 numbers of compressed keys, the same on every rank, best first,
            -1 behind them.

        Raises:
            InvalidFieldError: A shape does not fit, or the metadata is that of other layers or of
                another rank.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        if metadata.is_empty:
            shape = (metadata.num_tokens, 1, self.top_k)
            return torch.full(shape, -1, dtype=torch.int32, device=query.device)
        if metadata.index is None:
            raise InvalidFieldError("metadata.index", None, "the step of layers with an indexer")
        return self._indexer.forward(query, weights, index_cache, metadata.index)


class AscendDSADCPImpl(DCPImplMixin):
    """Attention of one layer over a window that each rank has and compressed keys that they share.

    Where a rank reads compressed keys, the operator is called with all heads and without keys in
    the window. No document speaks of requests without any, so a product has yet to show it.

    Args:
        num_heads: Query heads on this rank, N / size.
        scale: Factor on the scores.
        compression: Of the layer; None for the window alone.
        sinks: ``[N / size]`` float32 learnable sinks of this rank's heads; None for none.
        dcp_group: The ranks; None means this one alone.
        head_size: Elements of a key D; products take 512.

    Raises:
        InvalidFieldError: A count is not positive, or the sinks have another form.
    """

    def __init__(
        self,
        num_heads: int,
        scale: float,
        compression: DsaCompression | None = None,
        sinks: torch.Tensor | None = None,
        dcp_group: DCPGroup | None = None,
        head_size: int = KEY_SIZE,
    ) -> None:
        self.dcp_group = group_or_alone(dcp_group)
        self.num_heads, self.compression = num_heads, compression
        self._window = AscendDSAImpl(num_heads, scale, None, sinks, head_size)
        heads = num_heads * self.dcp_group.size
        self._shared = AscendDSAImpl(heads, scale, compression, None, head_size)

    def write_kv(
        self, kv: torch.Tensor, window_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write this step's keys into the cache of the window; see :class:`AscendDSAImpl`."""
        self._window.write_kv(kv, window_cache, slot_mapping)

    def forward(
        self,
        query: torch.Tensor,
        window_cache: torch.Tensor,
        metadata: AscendDSADCPMetadata,
        output: torch.Tensor,
        compressed_cache: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of this step's tokens; every rank must call it.

        Args:
            query: ``[T or more, N / size, D]`` rotated queries of this rank's heads.
            window_cache: ``[num_blocks, 1, block_size, D]`` view, all tokens on every rank.
            metadata: Of this step and this kind of layer, on this rank.
            output: ``[num_token_rows, N / size, D]``, written in place; its last elements still
                carry the rotation of the keys. Rows after the real tokens (padding) become 0.
            compressed_cache: ``[num_blocks, 1, block_size, D]`` view of this rank's cache, where
                the layer compresses.
            topk_indices: ``[T or more, 1, k]`` int32 numbers of compressed keys, the same on every
                rank, where the layer has an indexer.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata, a cache or choice is
                missing or superfluous, or the metadata was built for another rank.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        self._check_shard(metadata.dcp.shard, self.dcp_group.rank, self.dcp_group.size)
        rows = metadata.num_tokens
        if output.shape != query.shape:
            raise InvalidFieldError("output", list(output.shape), f"{list(query.shape)}, as query")
        parts = [self._window.forward_partial(query, window_cache, metadata)]
        if metadata.shared is not None:
            caches = (window_cache, compressed_cache)
            parts.append(self._over_compressed(query[:rows], caches, topk_indices, metadata))
        output[:rows] = self._window.with_sinks(merge_partials(parts))
        output[rows:].zero_()
        return output

    def _over_compressed(
        self,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor | None],
        topk_indices: torch.Tensor | None,
        metadata: AscendDSADCPMetadata,
    ) -> PartialAttention:
        shared, chosen = metadata.shared, topk_indices
        assert shared is not None  # noqa: S101 - asked for compressing layers only
        if chosen is not None:
            chosen = local_choice(chosen[: shared.num_tokens], metadata.dcp.shard)

        def over_own_keys(gathered: Tensors) -> PartialAttention:
            window_cache, compressed_cache = caches
            return self._shared.forward_partial(
                gathered[0], window_cache, shared, compressed_cache, chosen
            )

        return self.over_all_keys((query,), over_own_keys, metadata)
