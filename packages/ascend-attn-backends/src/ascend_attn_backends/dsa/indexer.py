"""Choice of compressed keys: the indexer of sparse latent attention over compressed index keys."""

from __future__ import annotations

import torch

from ..errors import InvalidFieldError
from ..indexer import AscendSFAIndexerImpl
from ..paged_step import check_shape
from .compression import INDEX_SIZE, DsaCompression
from .compressor import compressed_side
from .metadata import AscendDSAMetadata


class AscendDSAIndexerImpl:
    """Choice of compressed keys for each token of one layer.

    Args:
        num_heads: Index heads of the layer; every rank has all of them.
        compression: Of the layer; its ``top_k`` is the number of keys that a token attends to.
        index_size: Elements of an index key; products take 128.

    Raises:
        InvalidFieldError: A count is not positive, or the layer attends to all keys.
    """

    def __init__(
        self, num_heads: int, compression: DsaCompression, index_size: int = INDEX_SIZE
    ) -> None:
        if compression.top_k is None:
            raise InvalidFieldError("compression.top_k", None, "a number of keys")
        self.compression = compression
        self._indexer = AscendSFAIndexerImpl(num_heads, compression.top_k, index_size)

    def scaled_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights * num_heads ** -0.5 * index_size ** -0.5``, as DeepSeek-V4 uses it."""
        return self._indexer.scaled_weights(weights)

    def forward(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        index_cache: torch.Tensor,
        metadata: AscendDSAMetadata,
    ) -> torch.Tensor:
        """The best compressed keys of each real token.

        Args:
            query: ``[T or more, num_heads, 128]`` rotated index queries.
            weights: ``[T or more, num_heads]`` weight of each head, scaled.
            index_cache: ``[num_blocks, 1, block_size, 128]`` view that holds this step's keys too.
            metadata: Of this step.

        Returns:
            ``[T, 1, top_k]`` int32 numbers of compressed keys, best first, -1 behind them.

        Raises:
            InvalidFieldError: A shape does not fit, or the metadata is that of other layers.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        if metadata.is_empty:
            return self._indexer.forward(query, weights, index_cache, metadata)
        index = compressed_side(metadata, self.compression).index
        assert index is not None  # noqa: S101 - the builder makes it for every top_k
        check_shape("query", query, metadata.num_tokens, self._indexer.num_heads, None)
        check_shape("weights", weights, metadata.num_tokens, self._indexer.num_heads)
        query, weights = (rows.index_select(0, index.order) for rows in (query, weights))
        chosen = self._indexer.forward(query, weights, index_cache, index.step)
        return chosen.index_select(0, index.places)
