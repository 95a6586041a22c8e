"""Decode context parallelism of the standard backend."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ..batch import AttentionBatch
from ..errors import InvalidFieldError
from ..kv_layout import attention_view
from ..paged_layer import PagedAttentionLayer
from ..paged_step import check_shape
from .common import Tensors
from .group import DCPGroup, group_or_alone
from .launches import SharedKeysLayer, SharedKeysMetadata, SharedKeysMetadataBuilder


@attrs.frozen(eq=False, kw_only=True)
class AscendAttentionDCPMetadata(SharedKeysMetadata):
    """Metadata of one step on one rank; see :class:`SharedKeysMetadata` for its fields."""


@attrs.frozen
class AscendAttentionDCPMetadataBuilder(SharedKeysMetadataBuilder):
    """A pure function from batch to metadata, on one rank.

    Attributes:
        block_size: Tokens per cache block.
        shard: This rank's share of the keys.
    """

    def build(self, batch: AttentionBatch) -> AscendAttentionDCPMetadata:
        """Metadata of one step; nothing in it aliases the batch.

        Args:
            batch: Lengths of all ranks together, block table and slots of this rank; see
                :func:`sharded_batch`.

        Raises:
            AttentionBatchError: The block table has fewer columns than a request has blocks here.
        """
        return AscendAttentionDCPMetadata(**self._shared_fields(batch))


@attrs.frozen(eq=False, kw_only=True)
class KeyValueRankStep:
    """What one rank brings to a step of one layer.

    Attributes:
        query: ``[num_token_rows, N / size, D]`` of this rank's heads.
        key: ``[num_token_rows, KN, D]`` keys of the same tokens, all KN heads on every rank.
        value: ``[num_token_rows, KN, D]``.
        key_cache: ``[num_blocks, KN, block_size, D]`` view of this rank's cache, this step's own
            rows already written.
        value_cache: As ``key_cache``.
        metadata: Of this step on this rank.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: SharedKeysMetadata

    @property
    def queries(self) -> Tensors:
        """The queries."""
        return (self.query,)


class AscendAttentionDCPImpl(PagedAttentionLayer, SharedKeysLayer):
    """Grouped-query attention of one layer over keys that ranks share.

    Each rank has a share of the query heads and all key/value heads, as engines replicate them when
    there are more ranks than key/value heads. Heads are in the order of ranks: query head n uses
    key/value head ``n // (N / KN)``.

    Args:
        num_heads: Query heads on this rank, N / size.
        head_size: Elements per head D.
        scale: Factor on the scores, usually ``head_size ** -0.5``.
        num_kv_heads: Key/value heads KN of the cache, the same ones on every rank; None means N.
        dcp_group: The ranks; None means this one alone.

    Raises:
        InvalidFieldError: A count is not positive, N is not a multiple of KN, or a rank's heads
            begin or end inside a group of heads that share a key/value head.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        dcp_group: DCPGroup | None = None,
    ) -> None:
        self.dcp_group = group_or_alone(dcp_group)
        super().__init__(num_heads * self.dcp_group.size, head_size, scale, num_kv_heads)
        self.own_heads = num_heads
        self.own_kv_heads = kv_heads_of_rank(
            num_heads, self.num_kv_heads, self.dcp_group.rank, self.dcp_group.size
        )

    def forward(self, step: KeyValueRankStep, output: torch.Tensor) -> torch.Tensor:
        """Attention of this step's tokens over the keys of all ranks; every rank must call it.

        Args:
            step: What this rank brings.
            output: ``[num_token_rows, N / size, D]``, written in place. Rows after
                ``metadata.num_tokens`` (padding) and rows without any key become 0.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata, or the metadata was
                built for another rank.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        self._check_shapes(step, output)
        self._check_shard(step.metadata.dcp.shard, self.dcp_group.rank, self.dcp_group.size)
        return self._attend_shared(step, output)

    def _check_shapes(self, step: KeyValueRankStep, output: torch.Tensor) -> None:
        rows, size = step.metadata.num_tokens, self.head_size
        check_shape("query", step.query, rows, self.own_heads, size)
        check_shape("key", step.key, rows, self.num_kv_heads, size)
        check_shape("value", step.value, rows, self.num_kv_heads, size)
        check_shape("output", output, rows, self.own_heads, size)
        for name in ("key_cache", "value_cache"):
            cache = getattr(step, name)
            check_shape(name, cache, 1, self.num_kv_heads, step.metadata.block_size, size)

    def _caches(self, step: KeyValueRankStep) -> Tensors:
        return attention_view(step.key_cache), attention_view(step.value_cache)

    def _current(self, step: KeyValueRankStep) -> Tensors:
        return step.key[:, self.own_kv_heads], step.value[:, self.own_kv_heads]

    def _call(
        self, queries: Tensors, keys: Tensors, **arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (query,), (key, value) = queries, keys
        paged = "block_table" in arguments
        result: tuple[torch.Tensor, torch.Tensor]
        result = torch.ops.ascend_attn.fused_infer_attention_score(
            query,
            key,
            value,
            num_heads=query.shape[1],
            num_key_value_heads=self.num_kv_heads if paged else key.shape[1],
            scale=self.scale,
            input_layout="TND",
            **arguments,
        )
        return result


def kv_heads_of_rank(num_heads: int, num_kv_heads: int, rank: int, size: int) -> slice:
    """The key/value heads that a rank's query heads use.

    Args:
        num_heads: Query heads on a rank.
        num_kv_heads: Key/value heads KN, the same ones on every rank.
        rank: The rank.
        size: Number of ranks; ``num_heads * size`` is a multiple of KN.

    Raises:
        InvalidFieldError: A rank's heads begin or end inside a group that shares a key/value head.
    """
    group = num_heads * size // num_kv_heads
    if group % num_heads and num_heads % group:
        raise InvalidFieldError(
            "num_heads", num_heads, f"a divisor or a multiple of {group}, the heads per kv head"
        )
    first = rank * num_heads // group
    return slice(first, first + max(num_heads // group, 1))
