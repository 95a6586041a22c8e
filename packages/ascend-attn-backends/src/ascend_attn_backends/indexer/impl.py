"""Per-layer work of the indexer: write the index cache, choose the keys of each token."""

from __future__ import annotations

import torch

from ..errors import InvalidFieldError
from ..latent_layout import INDEX_SIZE, kernel_view
from ..paged_step import PagedStep, check_shape, write_rows


class AscendSFAIndexerImpl:
    """Choice of keys for one layer, and for the layers that reuse it.

    ``score[i, j] = sum_h weights[i, h] * relu(<query[i, h], key[j]>)``: heads are added before the
    choice, so all heads of a token share one set of keys. Factors such as ``size ** -0.5`` and
    ``num_heads ** -0.5`` belong into the weights (:meth:`scaled_weights`); the operator applies
    none.

    Args:
        num_heads: Index heads of the layer; every rank has all of them.
        top_k: Keys that a token attends to.
        index_size: Elements of an index row; products take 128.

    Raises:
        InvalidFieldError: A count is not positive.
    """

    def __init__(self, num_heads: int, top_k: int = 2048, index_size: int = INDEX_SIZE) -> None:
        sizes = {"num_heads": num_heads, "top_k": top_k, "index_size": index_size}
        for name, value in sizes.items():
            if value < 1:
                raise InvalidFieldError(name, value, "at least 1")
        self.num_heads, self.top_k, self.index_size = num_heads, top_k, index_size

    def scaled_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights * num_heads ** -0.5 * index_size ** -0.5``, as DeepSeek-V3.2 and GLM-5 use it.

        A positive factor of the scores passes through the relu, so it may stand in the weights.
        """
        factor = (self.num_heads * self.index_size) ** -0.5
        return weights * float(factor)

    def write_kv(
        self, index_key: torch.Tensor, index_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write this step's index rows into the cache, in place.

        The writing operator takes two rows per token. Here both are the same row and the same
        cache, so that the order of the two writes has no influence.

        Args:
            index_key: ``[T, 128]`` normalised and rotated, T at least ``num_token_rows``.
            index_cache: ``[num_blocks, 1, block_size, 128]`` view; a product wants it contiguous.
            slot_mapping: ``[num_token_rows]`` int64; tokens with a negative slot are skipped.

        Raises:
            InvalidFieldError: Fewer rows than slots.
            ascend_attn_ops.OpArgumentError: Shapes or dtypes break the operator's contract.
        """
        rows = ("index_key", index_key, index_cache)
        write_rows(rows, rows, slot_mapping)

    def forward(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        index_cache: torch.Tensor,
        metadata: PagedStep,
    ) -> torch.Tensor:
        """The best keys of each real token.

        Args:
            query: ``[num_token_rows, num_heads, 128]`` rotated index queries, any strides.
            weights: ``[num_token_rows, num_heads]`` weight of each head, scaled.
            index_cache: ``[num_blocks, 1, block_size, 128]`` view.
            metadata: Of this step.

        Returns:
            ``[T, 1, top_k]`` int32 positions in the request's own keys, best first, -1 behind them.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        rows = metadata.num_tokens
        check_shape("query", query, rows, self.num_heads, self.index_size)
        check_shape("weights", weights, rows, self.num_heads)
        check_shape("index_cache", index_cache, 1, 1, metadata.block_size, self.index_size)
        if metadata.is_empty:
            shape = (rows, 1, self.top_k)
            return torch.full(shape, -1, dtype=torch.int32, device=query.device)
        indices: torch.Tensor = torch.ops.ascend_attn.lightning_indexer(
            query[:rows].contiguous(),
            kernel_view("index_cache", index_cache, metadata.kernel_block_size),
            weights[:rows].contiguous(),
            actual_seq_lengths_query=metadata.query_ends,
            actual_seq_lengths_key=metadata.seq_lens,
            block_table=metadata.block_table,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=self.top_k,
            sparse_mode=metadata.sparse_mode,
        )[0]
        return indices
