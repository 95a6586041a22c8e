"""Decode context parallelism of the sparse latent backend.

A choice of keys names positions of the request, the same ones on every rank. Each rank attends over
the chosen keys that it has, so nothing but the partial results crosses ranks. The keys of this step
are read from the caches like all others: the choice already says which of them a token may see.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import attrs
import torch

from ascend_attn_ops import PartialAttention

from ..batch import AttentionBatch
from ..errors import InvalidFieldError
from ..paged_step import PagedStepBuilder, check_shape
from ..sfa import AscendSFAImpl, AscendSFAMetadata
from .common import AscendDCPMetadata, DCPMetadataBuilderMixin, Tensors
from .latent_ranks import LatentDCPLayer
from .shard import ContextShard
from .tokens import per_token_batch


@attrs.frozen(eq=False, kw_only=True)
class AscendSFADCPMetadata(AscendSFAMetadata):
    """Metadata of one step on one rank; see :class:`PagedStep` for the other fields.

    Under several ranks each token is a request of its own, whose ``seq_lens`` are the keys that it
    may see on this rank.

    Attributes:
        dcp: How this step is shared.
    """

    dcp: AscendDCPMetadata

    @property
    def num_own_tokens(self) -> int:
        """Tokens whose results this rank wants; the output rows after them are set to zero."""
        return self.num_tokens


@attrs.frozen
class SharedPagedStepBuilder(DCPMetadataBuilderMixin, PagedStepBuilder):
    """Fields of a :class:`PagedStep` over keys that ranks share; never reads a device tensor."""

    def shared_fields(self, batch: AttentionBatch) -> dict[str, Any]:
        """The fields of the step, and ``dcp``.

        Raises:
            AttentionBatchError: See :meth:`PagedStepBuilder.fields`.
            InvalidFieldError: The kernel block does not divide the block.
        """
        batch.validate_in_debug()
        rows = batch if self.shard.size == 1 else per_token_batch(batch, self.shard)
        return {**self.fields(rows), "dcp": self.dcp_metadata(batch)}


@attrs.frozen
class AscendSFADCPMetadataBuilder(SharedPagedStepBuilder):
    """A pure function from batch to metadata, on one rank, that never reads a device tensor.

    Attributes:
        block_size: Tokens per logical block of the cache.
        kernel_block_size: Tokens per block that the operator sees; None takes the largest.
        shard: This rank's share of the keys.
    """

    def build(self, batch: AttentionBatch) -> AscendSFADCPMetadata:
        """Metadata of one step; nothing in it aliases the batch.

        Args:
            batch: Lengths of all ranks together, block table and slots of this rank; see
                :func:`sharded_batch`.

        Raises:
            AttentionBatchError: See :meth:`PagedStepBuilder.fields`.
            InvalidFieldError: The kernel block does not divide the block.
        """
        return AscendSFADCPMetadata(**self.shared_fields(batch))


class AscendSFADCPImpl(LatentDCPLayer):
    """Absorbed latent attention of one layer over chosen keys that ranks share.

    See :class:`LatentDCPLayer` for its arguments.
    """

    @cached_property
    def _all_heads(self) -> AscendSFAImpl:
        """The layer with the heads of all ranks."""
        heads = self.num_heads * self.dcp_group.size
        return AscendSFAImpl(heads, self.scale, self.latent_size, self.rope_size)

    def forward(
        self,
        query_latent: torch.Tensor,
        query_rope: torch.Tensor,
        latent_cache: torch.Tensor,
        rope_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        metadata: AscendSFADCPMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of this step's tokens over the keys that they chose; every rank must call it.

        Args:
            query_latent: ``[num_token_rows, N / size, 512]`` absorbed queries of this rank's heads.
            query_rope: ``[num_token_rows, N / size, 64]`` rotated queries.
            latent_cache: ``[num_blocks, 1, block_size, 512]`` view of this rank's cache, this
                step's own rows already written.
            rope_cache: ``[num_blocks, 1, block_size, 64]`` view.
            topk_indices: ``[T or more, k]`` or ``[T or more, 1, k]`` int32 positions in the
                request's keys, the same on every rank, -1 behind them; what
                :class:`AscendSFAIndexerDCPImpl` returns.
            metadata: Of this step on this rank.
            output: ``[num_token_rows, N / size, 512]``, written in place. Rows after
                ``metadata.num_tokens`` (padding) and rows without a key become 0.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata, or the metadata was
                built for another rank.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        self._check_shard(metadata.dcp.shard, self.dcp_group.rank, self.dcp_group.size)
        queries = self._checked(query_latent, query_rope, metadata.num_own_tokens, output)
        caches = (latent_cache, rope_cache)
        return self._attend_shared(queries, caches, topk_indices, metadata, output)

    def _attend_shared(
        self,
        queries: Tensors,
        caches: tuple[torch.Tensor, torch.Tensor],
        topk_indices: torch.Tensor,
        metadata: AscendSFADCPMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Write the results of this rank's tokens, for the choice of all tokens of the metadata."""
        rows = metadata.num_own_tokens
        chosen = local_choice(topk_indices[: metadata.num_tokens], metadata.dcp.shard)

        def over_own_keys(gathered: Tensors) -> PartialAttention:
            layer = self._all_heads
            return layer.forward_partial(gathered[0], gathered[1], *caches, chosen, metadata)

        output[:rows] = self.over_all_keys(queries, over_own_keys, metadata).out
        output[rows:].zero_()
        return output

    def _checked(
        self, latent: torch.Tensor, rope: torch.Tensor, rows: int, output: torch.Tensor
    ) -> Tensors:
        """The queries of this rank's tokens."""
        check_shape("query_latent", latent, rows, self.num_heads, self.latent_size)
        check_shape("query_rope", rope, rows, self.num_heads, self.rope_size)
        check_shape("output", output, rows, self.num_heads, self.latent_size)
        return latent[:rows], rope[:rows]


def local_choice(topk_indices: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """The chosen keys that a rank has, as places among its own keys.

    Args:
        topk_indices: ``[T, k]`` or ``[T, 1, k]`` int32 positions in the request, -1 for none.
        shard: The rank.

    Returns:
        A new tensor of the same shape: int32 places in ascending order, -1 behind them.

    Raises:
        InvalidFieldError: The indices are not int32.
    """
    if topk_indices.dtype != torch.int32:
        raise InvalidFieldError("topk_indices", topk_indices.dtype, "torch.int32")
    nothing = torch.iinfo(torch.int32).max
    own = (topk_indices >= 0) & shard.owns(topk_indices)
    places = shard.local_positions(topk_indices).masked_fill(~own, nothing).sort(-1).values
    return places.masked_fill(places == nothing, -1)
