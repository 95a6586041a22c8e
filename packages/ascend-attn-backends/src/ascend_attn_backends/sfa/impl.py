"""Per-layer work of the sparse latent backend: write the caches, call the operator."""

from __future__ import annotations

from typing import Any

import torch

from ascend_attn_ops import PartialAttention

from ..latent_layer import LatentLayer
from ..latent_layout import kernel_view
from ..paged_step import PagedStep, check_shape

_MLA_ABSORBED = 2
"""``attention_mode`` of absorbed latent attention; the schema's default 0 is refused by CANN."""


class AscendSFAImpl(LatentLayer):
    """Absorbed latent attention of one layer over the keys that an indexer chose."""

    def forward(
        self,
        query_latent: torch.Tensor,
        query_rope: torch.Tensor,
        latent_cache: torch.Tensor,
        rope_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        metadata: PagedStep,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of this step's tokens over the cached tokens that they chose.

        Args:
            query_latent: ``[num_token_rows, N, 512]`` absorbed queries, any strides.
            query_rope: ``[num_token_rows, N, 64]`` rotated queries.
            latent_cache: ``[num_blocks, 1, block_size, 512]`` view.
            rope_cache: ``[num_blocks, 1, block_size, 64]`` view.
            topk_indices: ``[T or more, k]`` or ``[T or more, 1, k]`` int32 positions in the
                request's own keys, -1 behind them. A row of -1 gives 0; positions that a token may
                not see are skipped.
            metadata: Of this step.
            output: ``[num_token_rows, N, 512]``, written in place. Rows after
                ``metadata.num_tokens`` (padding) become 0.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        check_shape("output", output, metadata.num_tokens, self.num_heads, self.latent_size)
        caches = (latent_cache, rope_cache)
        result = self._attend(query_latent, query_rope, caches, topk_indices, metadata)
        output[: metadata.num_tokens] = result[0]
        output[metadata.num_tokens :].zero_()
        return output

    def forward_partial(
        self,
        query_latent: torch.Tensor,
        query_rope: torch.Tensor,
        latent_cache: torch.Tensor,
        rope_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        metadata: PagedStep,
    ) -> PartialAttention:
        """As :meth:`forward`, with what is needed to merge it with other parts of the keys.

        The statistics are asked for over a paged cache, which vllm-ascend does for decode context
        parallel although the documents call them a feature of training.

        Returns:
            out ``[T, N, 512]`` and natural-log lse ``[T, N]`` float32 of the T real tokens; a token
            that chose nothing has out 0 and lse -inf.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        out, maximum, total = self._attend(
            query_latent,
            query_rope,
            (latent_cache, rope_cache),
            topk_indices,
            metadata,
            return_softmax_lse=True,
        )
        return PartialAttention.from_max_and_sum(out, maximum, total)

    def _attend(
        self,
        query_latent: torch.Tensor,
        query_rope: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        topk_indices: torch.Tensor,
        metadata: PagedStep,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, heads = metadata.num_tokens, self.num_heads
        check_shape("query_latent", query_latent, rows, heads, self.latent_size)
        check_shape("query_rope", query_rope, rows, heads, self.rope_size)
        if metadata.is_empty:
            out = query_latent.new_zeros(rows, heads, self.latent_size)
            statistic = out.new_zeros(1, rows, heads, dtype=torch.float32)
            return out, statistic, statistic
        latent, rope = self._kernel_caches(*caches, metadata)
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        result = torch.ops.ascend_attn.sparse_flash_attention(
            query_latent[:rows].contiguous(),
            latent,
            latent,
            _entries(topk_indices, rows),
            self.scale,
            block_table=metadata.block_table,
            actual_seq_lengths_query=metadata.query_ends,
            actual_seq_lengths_kv=metadata.seq_lens,
            query_rope=query_rope[:rows].contiguous(),
            key_rope=rope,
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=metadata.sparse_mode,
            attention_mode=_MLA_ABSORBED,
            **options,
        )
        return result

    def _kernel_caches(
        self, latent_cache: torch.Tensor, rope_cache: torch.Tensor, metadata: PagedStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = {"latent_cache": self.latent_size, "rope_cache": self.rope_size}
        caches = dict(zip(sizes, (latent_cache, rope_cache), strict=True))
        for name, size in sizes.items():
            check_shape(name, caches[name], 1, 1, metadata.block_size, size)
        latent, rope = (
            kernel_view(name, cache, metadata.kernel_block_size) for name, cache in caches.items()
        )
        return latent, rope


def _entries(topk_indices: torch.Tensor, rows: int) -> torch.Tensor:
    """``[T, 1, k]`` of the indices, given with or without the dimension of the key head."""
    if topk_indices.dim() == 2:
        topk_indices = topk_indices[:, None]
    check_shape("topk_indices", topk_indices, rows, 1, None)
    return topk_indices[:rows].contiguous()
