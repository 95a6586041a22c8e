"""Per-layer work of the standard backend: write the cache, call the operator."""

from __future__ import annotations

import torch

from ..kv_layout import attention_view
from ..paged_layer import PagedAttentionLayer
from .metadata import AscendMetadata, AttentionLaunch


class AscendAttentionBackendImpl(PagedAttentionLayer):
    """Attention of one layer; see :class:`PagedAttentionLayer` for its arguments."""

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
        key, value = attention_view(key_cache), attention_view(value_cache)
        for launch in metadata.launches:
            result = self._attend(launch.gather(query), key, value, metadata, launch)
            launch.scatter(result, output)
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
        result: torch.Tensor = torch.ops.ascend_attn.fused_infer_attention_score(
            query,
            key,
            value,
            atten_mask=metadata.causal_template if mode.needs_template else None,
            actual_seq_lengths=launch.query_lens_cumulative,
            actual_seq_lengths_kv=launch.seq_lens,
            block_table=launch.block_table,
            num_heads=self.num_heads,
            scale=self.scale,
            pre_tokens=mode.pre_tokens,
            next_tokens=mode.next_tokens,
            input_layout="TND",
            num_key_value_heads=self.num_kv_heads,
            sparse_mode=mode.sparse_mode,
            block_size=metadata.block_size,
        )[0]
        return result
