"""Decode context parallelism of the indexer: one choice of keys, whoever has the keys.

A rank finds the best of its own keys. The best of all keys are among these candidates, so the ranks
exchange the candidates with their scores and choose once more; every rank makes the same choice.
Candidates are scored again in float32: the operator returns no scores over a paged cache (op-plugin
docs npu_lightning_indexer), and rounds them to half precision where it does, which would make ties.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ..batch import AttentionBatch
from ..errors import InvalidFieldError
from ..indexer import AscendSFAIndexerImpl, AscendSFAIndexerMetadata
from ..latent_layout import INDEX_SIZE, kernel_view
from ..paged_step import PagedStep
from .common import AscendDCPMetadata, DCPImplMixin, Tensors
from .group import DCPGroup, group_or_alone
from .sfa import SharedPagedStepBuilder

_TILE_ELEMENTS = 1 << 22
"""Elements of the products of some tokens with their candidates: 16 MiB in float32."""


@attrs.frozen(eq=False, kw_only=True)
class AscendSFAIndexerDCPMetadata(AscendSFAIndexerMetadata):
    """Metadata of one step on one rank; see :class:`PagedStep` for the other fields.

    Under several ranks each token is a request of its own, whose ``seq_lens`` are the keys that it
    may see on this rank.

    Attributes:
        dcp: How this step is shared.
    """

    dcp: AscendDCPMetadata


@attrs.frozen
class AscendSFAIndexerDCPMetadataBuilder(SharedPagedStepBuilder):
    """A pure function from batch to metadata, on one rank, that never reads a device tensor.

    Attributes:
        block_size: Tokens per logical block of the index cache.
        kernel_block_size: Tokens per block that the operator sees; None takes the largest.
        shard: This rank's share of the keys, that of the latent cache.
    """

    def build(self, batch: AttentionBatch) -> AscendSFAIndexerDCPMetadata:
        """Metadata of one step; nothing in it aliases the batch.

        Args:
            batch: Lengths of all ranks together, block table and slots of this rank; see
                :func:`sharded_batch`.

        Raises:
            AttentionBatchError: See :meth:`PagedStepBuilder.fields`.
            InvalidFieldError: The kernel block does not divide the block.
        """
        return AscendSFAIndexerDCPMetadata(**self.shared_fields(batch))


class AscendSFAIndexerDCPImpl(DCPImplMixin, AscendSFAIndexerImpl):
    """Choice of keys for one layer whose index keys are shared by ranks.

    Args:
        num_heads: Index heads of the layer; every rank has all of them.
        top_k: Keys that a token attends to.
        dcp_group: The ranks; None means this one alone.
        index_size: Elements of an index row; products take 128.

    Raises:
        InvalidFieldError: A count is not positive.
    """

    def __init__(
        self,
        num_heads: int,
        top_k: int = 2048,
        dcp_group: DCPGroup | None = None,
        index_size: int = INDEX_SIZE,
    ) -> None:
        super().__init__(num_heads, top_k, index_size)
        self.dcp_group = group_or_alone(dcp_group)

    def forward(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        index_cache: torch.Tensor,
        metadata: PagedStep,
    ) -> torch.Tensor:
        """The best keys of each real token among those of all ranks; every rank must call it.

        Args:
            query: ``[num_token_rows, num_heads, 128]`` rotated index queries, the same on every
                rank.
            weights: ``[num_token_rows, num_heads]`` weight of each head, scaled.
            index_cache: ``[num_blocks, 1, block_size, 128]`` view of this rank's cache.
            metadata: :class:`AscendSFAIndexerDCPMetadata` of this step on this rank.

        Returns:
            ``[T, 1, top_k]`` int32 positions in the request's own keys, the same on every rank,
            best first, -1 behind them.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata, or the metadata was
                built for another rank.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        shared = shared_step(metadata)
        self._check_shard(shared.dcp.shard, self.dcp_group.rank, self.dcp_group.size)
        return self._choose(query, weights, index_cache, shared)

    def _choose(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        index_cache: torch.Tensor,
        metadata: AscendSFAIndexerDCPMetadata,
    ) -> torch.Tensor:
        """As :meth:`forward`, for the tokens of the metadata."""
        best = super().forward(query, weights, index_cache, metadata)
        if not metadata.dcp.exchanges:
            return best
        own = self._candidates(best, (query, weights), index_cache, metadata)
        return self._best_of_ranks(own, metadata)[:, 1:]

    def _best_of_ranks(
        self, candidates: torch.Tensor, metadata: AscendSFAIndexerDCPMetadata
    ) -> torch.Tensor:
        """The best candidates of all ranks for this rank's tokens."""
        return best_candidates(self.dcp_group.all_gather(candidates), self.top_k)

    def _candidates(
        self,
        best: torch.Tensor,
        rows: Tensors,
        index_cache: torch.Tensor,
        metadata: AscendSFAIndexerDCPMetadata,
    ) -> torch.Tensor:
        """``[T, 2, k]`` int32: scores (bits of float32) and positions of this rank's best keys."""
        places = best[:, 0]
        cache = kernel_view("index_cache", index_cache, metadata.kernel_block_size)
        query, weights = (part[: len(places)] for part in rows)
        scores = candidate_scores(query, weights, cache, metadata.block_table, places)
        positions = metadata.dcp.shard.global_positions(places).masked_fill(places < 0, -1)
        return torch.stack([scores.view(torch.int32), positions.int()], 1)


def shared_step(metadata: PagedStep) -> AscendSFAIndexerDCPMetadata:
    """The metadata, which must say how its step is shared.

    Raises:
        InvalidFieldError: It comes from a builder for one rank.
    """
    if isinstance(metadata, AscendSFAIndexerDCPMetadata):
        return metadata
    raise InvalidFieldError("metadata", type(metadata).__name__, "that of a DCP or PCP builder")


def candidate_scores(
    query: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """``sum_h weights[i, h] * relu(<query[i, h], key>)`` of each token's candidates.

    Args:
        query: ``[T, num_heads, 128]``.
        weights: ``[T, num_heads]``.
        cache: ``[num_blocks, block_size, 1, 128]``.
        block_table: ``[T, max_blocks]`` int32, a row per token.
        places: ``[T, k]`` int32 places among the keys of the token's request, -1 for none.

    Returns:
        ``[T, k]`` float32, computed in it; -inf where there is no candidate.
    """
    heads, count = query.shape[1], places.shape[1]
    rows = max(_TILE_ELEMENTS // (count * max(heads, query.shape[2])), 1)
    tiles = [slice(first, first + rows) for first in range(0, len(query), rows)]
    return torch.cat(
        [_tile_scores(query[t], weights[t], block_table[t], places[t], cache) for t in tiles]
    )


def _tile_scores(
    query: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    places: torch.Tensor,
    cache: torch.Tensor,
) -> torch.Tensor:
    size, real = cache.shape[1], places.clamp(min=0).long()
    blocks = block_table.gather(1, real // size).long()
    keys = cache[blocks, real % size, 0].float()  # [t, k, 128]
    products = (query.float() @ keys.transpose(1, 2)).relu()
    scores = (weights.float()[:, None] @ products)[:, 0]
    return scores.masked_fill(places < 0, float("-inf"))


def best_candidates(parts: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """The best ``count`` candidates of several ranks.

    Args:
        parts: ``[T, 2, k]`` int32 each: scores (bits of float32) and positions.
        count: How many to keep.

    Returns:
        ``[T, 2, count]`` int32, best first; score -inf and position -1 behind them. The lower rank
        goes first in a tie.
    """
    scores, positions = torch.cat(list(parts), -1).unbind(1)
    order = scores.view(torch.float32).sort(dim=-1, descending=True, stable=True).indices
    order = order[:, :count]
    return torch.stack([scores.gather(1, order), positions.gather(1, order)], 1)
