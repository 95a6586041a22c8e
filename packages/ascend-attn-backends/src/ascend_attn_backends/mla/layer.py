"""What layers with dense latent attention share: cache views and the operator call."""

from __future__ import annotations

from typing import Any

import torch

from ascend_attn_ops import StepCalls, call, fused_infer_attention_score

from ..kv_layout import attention_view
from ..latent_layer import LatentLayer
from ..paged_step import check_shape


class LatentAttentionLayer(LatentLayer):
    """A layer with absorbed latent attention over all keys, by fused_infer_attention_score."""

    def _cache_views(
        self, latent_cache: torch.Tensor, rope_cache: torch.Tensor, block_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both caches as the operator reads them, in one layout and without a copy."""
        check_shape("latent_cache", latent_cache, 1, 1, block_size, self.latent_size)
        check_shape("rope_cache", rope_cache, 1, 1, block_size, self.rope_size)
        views = attention_view(latent_cache), attention_view(rope_cache)
        if views[0].dim() == views[1].dim():
            return views
        return latent_cache, rope_cache

    def _check_queries(self, query: torch.Tensor, rope: torch.Tensor, rows: int) -> None:
        check_shape("q_nope", query, rows, self.num_heads, self.latent_size)
        check_shape("q_pe", rope, rows, self.num_heads, self.rope_size)

    def _call(
        self,
        queries: tuple[torch.Tensor, ...],
        keys: tuple[torch.Tensor, ...],
        calls: StepCalls | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The operator on (latent, rope) queries and keys; the values are the latents.

        Args:
            queries: Of this layer.
            keys: Of this layer.
            calls: Those of the step, where its layers repeat this one.
            **arguments: Further arguments of the operator.
        """
        (query, query_rope), (latent, rope) = queries, keys
        tensors = {"query": query, "key": latent, "value": latent}
        result: tuple[torch.Tensor, torch.Tensor]
        result = (calls or call)(
            fused_infer_attention_score,
            {**tensors, "query_rope": query_rope, "key_rope": rope},
            num_heads=query.shape[1],
            num_key_value_heads=1,
            scale=self.scale,
            input_layout="TND",
            **arguments,
        )
        return result
