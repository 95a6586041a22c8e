"""Per-layer work of the standard backend: write the cache, call the operator."""

from __future__ import annotations

from typing import Any

import torch

from ascend_attn_ops import fused_infer_attention_score

from ..cache_views import CacheViews
from ..kv_layout import attention_view
from ..paged_layer import PagedAttentionLayer
from .metadata import AscendMetadata, AttentionLaunch
from .token_step import TokenStep

_FULL_MASK = 1  # sparse_mode of a mask without a rule


class AscendAttentionBackendImpl(PagedAttentionLayer):
    """Attention of one layer; see :class:`PagedAttentionLayer` for its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._views = CacheViews(
            lambda *caches: (attention_view(caches[0]), attention_view(caches[1]))
        )

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AscendMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of this step's tokens over the cache, their own keys included.

        Args:
            query: ``[num_token_rows, N, D]``, any strides.
            key_cache: ``[num_blocks, KN, block_size, D]`` view, any strides.
            value_cache: As ``key_cache``.
            metadata: Of this step.
            output: ``[num_token_rows, N, D]``, written in place. Rows after ``metadata.num_tokens``
                (padding) become 0.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        self._check(query, key_cache, metadata, output)
        key, value = self._views(key_cache, value_cache)
        for launch in metadata.launches:
            result = self._attend(launch.gather(query), key, value, metadata, launch)
            launch.scatter(result, output)
        step = metadata.token_step
        if step is not None:
            step.scatter(self._attend_tokens(step.gather(query), key, value, step), output)
        if output.shape[0] > metadata.num_tokens:
            output[metadata.num_tokens :].zero_()
        return output

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AscendMetadata,
        launch: AttentionLaunch,
    ) -> torch.Tensor:
        mode = self._modes[launch.causal]

        def fixed() -> dict[str, Any]:
            return {
                "atten_mask": metadata.causal_template if mode.needs_template else None,
                "actual_seq_lengths": launch.query_lens_cumulative,
                "actual_seq_lengths_kv": launch.seq_lens,
                "block_table": launch.block_table,
                "num_heads": self.num_heads,
                "scale": self.scale,
                "pre_tokens": mode.pre_tokens,
                "next_tokens": mode.next_tokens,
                "input_layout": "TND",
                "num_key_value_heads": self.num_kv_heads,
                "sparse_mode": mode.sparse_mode,
                "block_size": metadata.block_size,
            }

        tensors = {"query": query, "key": key, "value": value}
        kind = (self.num_heads, self.num_kv_heads, self.scale, mode)
        result: torch.Tensor = launch.calls(fused_infer_attention_score, tensors, kind, fixed)[0]
        return result

    def _attend_tokens(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: TokenStep
    ) -> torch.Tensor:
        """``[T, N, D]``, every token as a request of its own under a mask made on the device."""
        mask = step.mask(self.sliding_window)
        result: torch.Tensor = torch.ops.ascend_attn.fused_infer_attention_score(
            query[:, :, None].contiguous(),
            key,
            value,
            atten_mask=mask.hidden,
            actual_seq_lengths_kv=step.key_bounds,
            block_table=step.block_table,
            num_heads=self.num_heads,
            scale=self.scale,
            input_layout="BNSD",
            num_key_value_heads=self.num_kv_heads,
            sparse_mode=_FULL_MASK,
            block_size=step.block_size,
        )[0]
        return result[:, :, 0].masked_fill(mask.keyless, 0.0)
