"""What layers with dense latent attention share: cache views and the operator call."""

from __future__ import annotations

from typing import Any

import torch

from ascend_attn_ops import call, fused_infer_attention_score

from ..cache_views import CacheViews
from ..kv_layout import attention_view
from ..latent_layer import LatentLayer
from ..paged_step import check_shape


class LatentAttentionLayer(LatentLayer):
    """A layer with absorbed latent attention over all keys, by fused_infer_attention_score."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._views = CacheViews(_one_layout)

    def _cache_views(
        self, latent_cache: torch.Tensor, rope_cache: torch.Tensor, block_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both caches as the operator reads them, in one layout and without a copy."""
        check_shape("latent_cache", latent_cache, 1, 1, block_size, self.latent_size)
        check_shape("rope_cache", rope_cache, 1, 1, block_size, self.rope_size)
        return self._views(latent_cache, rope_cache)

    def _check_queries(self, query: torch.Tensor, rope: torch.Tensor, rows: int) -> None:
        check_shape("q_nope", query, rows, self.num_heads, self.latent_size)
        check_shape("q_pe", rope, rows, self.num_heads, self.rope_size)

    def _call(
        self,
        queries: tuple[torch.Tensor, ...],
        keys: tuple[torch.Tensor, ...],
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The operator on (latent, rope) queries and keys; the values are the latents."""
        fixed = {**self._fixed(queries[0].shape[1]), **arguments}
        result: tuple[torch.Tensor, torch.Tensor]
        result = call(fused_infer_attention_score, own_tensors(queries, keys), **fixed)
        return result

    def _fixed(self, num_heads: int) -> dict[str, Any]:
        """Arguments of the operator that are those of the layer."""
        heads = {"num_heads": num_heads, "num_key_value_heads": 1}
        return {**heads, "scale": self.scale, "input_layout": "TND"}


def _one_layout(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    views = attention_view(latent), attention_view(rope)
    return views if views[0].dim() == views[1].dim() else (latent, rope)


def own_tensors(
    queries: tuple[torch.Tensor, ...], keys: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    """Queries and keys, (latent, rope) each, as the operator calls them."""
    (query, query_rope), (latent, rope) = queries, keys
    return {"query": query, "key": latent, "value": latent,
            "query_rope": query_rope, "key_rope": rope}  # fmt: skip
