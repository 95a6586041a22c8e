"""Prefill context parallelism of the sparse latent backend and its indexer.

The indexer chooses for a rank's tokens among the keys of the whole request: the index rows of all
ranks' tokens are gathered and written before it, as the latents are.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ..batch import AttentionBatch
from ..latent_layout import INDEX_SIZE
from ..paged_step import PagedStep
from .group import DCPGroup, group_or_alone
from .latent_ranks import LatentPCPLayer
from .prefill import (
    AscendPCPMetadata,
    PCPImplMixin,
    PCPMetadataBuilderMixin,
    segment_batch,
    spread_of,
    with_exact_starts,
)
from .sfa import AscendSFADCPImpl, AscendSFADCPMetadata, SharedPagedStepBuilder
from .sfa_indexer import (
    AscendSFAIndexerDCPImpl,
    AscendSFAIndexerDCPMetadata,
    best_candidates,
    shared_step,
)


@attrs.frozen(eq=False, kw_only=True)
class AscendSFAPCPMetadata(AscendSFADCPMetadata):
    """Metadata of one step on one rank; see :class:`AscendSFADCPMetadata` for the other fields.

    ``num_tokens``, lengths and blocks speak of the rows that read this rank's cache: the tokens of
    all ranks in the gathered order, or this rank's own where each rank has all keys.

    Attributes:
        pcp: How the tokens are spread.
        slot_mapping: ``[num_tokens of the step]`` int64, in the gathered order.
    """

    pcp: AscendPCPMetadata

    @property
    def num_own_tokens(self) -> int:
        """Tokens that this rank computes."""
        return self.pcp.num_own


@attrs.frozen(eq=False, kw_only=True)
class AscendSFAIndexerPCPMetadata(AscendSFAIndexerDCPMetadata):
    """The same for the index cache; see :class:`AscendSFAPCPMetadata`.

    Attributes:
        pcp: How the tokens are spread.
    """

    pcp: AscendPCPMetadata


@attrs.frozen
class _SpreadStepBuilder(PCPMetadataBuilderMixin, SharedPagedStepBuilder):
    """Fields of a paged step whose tokens are spread over ranks."""

    def spread_fields(self, batch: AttentionBatch) -> dict[str, Any]:
        """The fields of the step, ``dcp`` and ``pcp``."""
        batch = with_exact_starts(batch)
        plan = self.token_plan(batch)
        return {
            **self.shared_fields(self.read_batch(batch, plan)),
            "slot_mapping": segment_batch(batch, plan.gathered).slot_mapping,
            "pcp": self.pcp_metadata(batch, plan),
        }


@attrs.frozen
class AscendSFAPCPMetadataBuilder(_SpreadStepBuilder):
    """A pure function from batch to metadata, on one rank.

    Of the device it reads nothing but query starts, where the batch has no host copy of them.

    Attributes:
        block_size: Tokens per logical block of the cache.
        kernel_block_size: Tokens per block that the operator sees; None takes the largest.
        shard: This rank's share of the keys.
        prefill: This rank's share of the tokens.
        shares_keys: See :class:`PCPMetadataBuilderMixin`.
        num_spec_tokens: Drafts per request, k.
    """

    def build(self, batch: AttentionBatch) -> AscendSFAPCPMetadata:
        """Metadata of one step; nothing in it aliases the batch.

        Args:
            batch: All tokens of the step with :attr:`AttentionBatch.is_prefilling`, lengths of all
                ranks together, block table and slots of this rank; see :func:`sharded_batch`.

        Raises:
            AttentionBatchError: See :meth:`PagedStepBuilder.fields`, or ``is_prefilling`` is None
                although a request has several tokens.
            InvalidFieldError: The kernel block does not divide the block.
        """
        return AscendSFAPCPMetadata(**self.spread_fields(batch))


@attrs.frozen
class AscendSFAIndexerPCPMetadataBuilder(_SpreadStepBuilder):
    """The same for the index cache; see :class:`AscendSFAPCPMetadataBuilder` for its attributes."""

    def build(self, batch: AttentionBatch) -> AscendSFAIndexerPCPMetadata:
        """Metadata of one step; see :meth:`AscendSFAPCPMetadataBuilder.build`."""
        return AscendSFAIndexerPCPMetadata(**self.spread_fields(batch))


class AscendSFAPCPImpl(LatentPCPLayer, AscendSFADCPImpl):
    """Absorbed latent attention over chosen keys, with tokens, and perhaps keys, spread over ranks.

    A step of a layer: project this rank's tokens (``metadata.pcp.own_rows``), gather and write
    latents and index rows, choose keys, then :meth:`forward`.

    See :class:`LatentPCPLayer` for its arguments.
    """

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
        """Attention of this rank's tokens over the keys that they chose; every rank must call it.

        Args:
            query_latent: ``[num_own_tokens or more, N, 512]`` absorbed queries.
            query_rope: ``[num_own_tokens or more, N, 64]`` rotated queries.
            latent_cache: ``[num_blocks, 1, block_size, 512]`` view of this rank's cache, the rows
                of all tokens of the step that belong into it already written.
            rope_cache: ``[num_blocks, 1, block_size, 64]`` view.
            topk_indices: ``[num_own_tokens or more, 1, k]`` int32 positions in the request's keys,
                -1 behind them; what :class:`AscendSFAIndexerPCPImpl` returns.
            metadata: :class:`AscendSFAPCPMetadata` of this step on this rank.
            output: ``[num_own_tokens or more, N, 512]``, written in place. Rows after
                ``metadata.num_own_tokens`` and rows without a key become 0.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata, or the metadata was
                built for another rank.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        pcp = self._check_shares(metadata)
        queries = self._checked(query_latent, query_rope, metadata.num_own_tokens, output)
        if pcp.shares_keys:
            (topk_indices,) = self.gather_tokens((topk_indices,), pcp)
        caches = (latent_cache, rope_cache)
        return self._attend_shared(queries, caches, topk_indices, metadata, output)


class AscendSFAIndexerPCPImpl(PCPImplMixin, AscendSFAIndexerDCPImpl):
    """Choice of keys for one layer whose tokens, and perhaps index keys, are spread over ranks.

    Args:
        num_heads: Index heads of the layer; every rank has all of them.
        top_k: Keys that a token attends to.
        pcp_group: The ranks that share the tokens; None means this one alone.
        dcp_group: The ranks with the same tokens that share keys; None means this one alone.
        index_size: Elements of an index row; products take 128.

    Raises:
        InvalidFieldError: A count is not positive.
    """

    def __init__(
        self,
        num_heads: int,
        top_k: int = 2048,
        pcp_group: DCPGroup | None = None,
        dcp_group: DCPGroup | None = None,
        index_size: int = INDEX_SIZE,
    ) -> None:
        super().__init__(num_heads, top_k, dcp_group, index_size)
        self.pcp_group = group_or_alone(pcp_group)

    def gather_and_write_kv(
        self,
        index_key: torch.Tensor,
        index_cache: torch.Tensor,
        metadata: AscendSFAIndexerPCPMetadata,
    ) -> None:
        """Write the index rows of all ranks' tokens that belong into this rank's cache, in place.

        Every rank must call it, before :meth:`forward`.

        Args:
            index_key: ``[num_own_tokens or more, 128]`` of this rank's tokens.
            index_cache: ``[num_blocks, 1, block_size, 128]`` view; a product wants it contiguous.
            metadata: Of this step.

        Raises:
            InvalidFieldError: The metadata was built for another rank.
            ascend_attn_ops.OpArgumentError: Shapes or dtypes break the operator's contract.
        """
        (rows,) = self.gather_tokens((index_key,), self._check_shares(metadata))
        self.write_kv(rows, index_cache, metadata.slot_mapping)

    def forward(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        index_cache: torch.Tensor,
        metadata: PagedStep,
    ) -> torch.Tensor:
        """The best keys of each of this rank's tokens among all keys; every rank must call it.

        Args:
            query: ``[num_own_tokens or more, num_heads, 128]`` rotated index queries.
            weights: ``[num_own_tokens or more, num_heads]`` weight of each head, scaled.
            index_cache: ``[num_blocks, 1, block_size, 128]`` view of this rank's cache.
            metadata: :class:`AscendSFAIndexerPCPMetadata` of this step on this rank.

        Returns:
            ``[num_own_tokens, 1, top_k]`` int32 positions in the request's own keys, best first, -1
            behind them.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata, or the metadata was
                built for another rank.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        shared = shared_step(metadata)
        pcp = self._check_shares(shared)
        if pcp.shares_keys:  # two gathers: the weights may be float32 beside half queries
            (query,) = self.gather_tokens((query,), pcp)
            (weights,) = self.gather_tokens((weights,), pcp)
        return self._choose(query, weights, index_cache, shared)

    def _best_of_ranks(
        self, candidates: torch.Tensor, metadata: AscendSFAIndexerDCPMetadata
    ) -> torch.Tensor:
        best, pcp = super()._best_of_ranks(candidates, metadata), spread_of(metadata)
        if not pcp.shares_keys:
            return best
        return best_candidates(self.send_tokens(best, pcp), self.top_k)
