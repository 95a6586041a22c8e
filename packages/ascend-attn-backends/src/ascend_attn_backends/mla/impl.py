"""Per-layer work of the latent backend: write the caches, call the operator."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from ascend_attn_ops import PartialAttention, fused_infer_attention_score

from ..masks import MaskMode
from ..paged_step import check_shape
from ..sfa import AscendSFAImpl
from ..standard import AttentionLaunch
from .layer import LatentAttentionLayer, own_tensors
from .metadata import AscendMLAMetadata


class AscendMLAImpl(LatentAttentionLayer):
    """Absorbed latent attention of one layer; see :class:`LatentAttentionLayer`.

    Prefill goes through the absorbed form too: 576-wide scores instead of 192-wide ones, in
    exchange for one path that reads nothing but the cache.
    """

    def forward_mqa(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        latent_cache: torch.Tensor,
        rope_cache: torch.Tensor,
        metadata: AscendMLAMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of this step's tokens over the cache, their own rows included.

        Args:
            q_nope: ``[num_token_rows, N, 512]`` absorbed queries, any strides.
            q_pe: ``[num_token_rows, N, 64]`` rotated queries.
            latent_cache: ``[num_blocks, 1, block_size, 512]`` view, any strides.
            rope_cache: ``[num_blocks, 1, block_size, 64]`` view.
            metadata: Of this step.
            output: ``[num_token_rows, N, 512]``, written in place. Rows after
                ``metadata.num_tokens`` (padding) and rows without any key become 0.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        rows = metadata.num_tokens
        check_shape("output", output, rows, self.num_heads, self.latent_size)
        caches = self._check(q_nope, q_pe, latent_cache, rope_cache, metadata)
        for launch in metadata.launches:
            result, _ = self._attend(q_nope, q_pe, caches, metadata, launch, lse=False)
            launch.scatter(result, output)
        chosen = metadata.all_keys
        if chosen is not None:
            queries = chosen.gather(q_nope), chosen.gather(q_pe)
            tensors = (*queries, latent_cache, rope_cache, chosen.indices, chosen.step)
            result = self._by_indices.forward(*tensors, torch.empty_like(queries[0]))
            chosen.scatter(result, output)
        if metadata.keyless_tokens is not None:
            output[:rows].masked_fill_(metadata.keyless_tokens[:, None, None], 0.0)
        if output.shape[0] > rows:
            output[rows:].zero_()
        return output

    def forward_mqa_partial(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        latent_cache: torch.Tensor,
        rope_cache: torch.Tensor,
        metadata: AscendMLAMetadata,
    ) -> PartialAttention:
        """As :meth:`forward_mqa`, with what is needed to merge it with other parts of the keys.

        The documents of the operator allow the lse beside ropes and vllm-ascend asks for it; the
        checker that CANN had in November 2025 refused it (561002).

        Returns:
            out ``[T, N, 512]`` and natural-log lse ``[T, N]`` float32 of the T real tokens; a token
            without any key has out 0 and lse -inf.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        caches = self._check(q_nope, q_pe, latent_cache, rope_cache, metadata)
        shape = (metadata.num_tokens, self.num_heads)
        out = q_nope.new_zeros(*shape, self.latent_size)
        lse = out.new_full(shape, float("-inf"), dtype=torch.float32)
        for launch in metadata.launches:
            result = self._attend(q_nope, q_pe, caches, metadata, launch, lse=True)
            part = PartialAttention.from_infinite_lse(*result)
            launch.scatter(part.out, out)
            launch.scatter(part.lse, lse)
        chosen = metadata.all_keys
        if chosen is not None:
            queries = chosen.gather(q_nope), chosen.gather(q_pe)
            tensors = (*queries, latent_cache, rope_cache, chosen.indices, chosen.step)
            part = self._by_indices.forward_partial(*tensors)
            chosen.scatter(part.out, out)
            chosen.scatter(part.lse, lse)
        return metadata.neutral(PartialAttention(out, lse))

    @cached_property
    def _by_indices(self) -> AscendSFAImpl:
        """This layer by the operator that takes its lengths from the device."""
        return AscendSFAImpl(self.num_heads, self.scale, self.latent_size, self.rope_size)

    def _check(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        latent_cache: torch.Tensor,
        rope_cache: torch.Tensor,
        metadata: AscendMLAMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_queries(q_nope, q_pe, metadata.num_tokens)
        return self._cache_views(latent_cache, rope_cache, metadata.block_size)

    def _attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        metadata: AscendMLAMetadata,
        launch: AttentionLaunch,
        *,
        lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def fixed() -> dict[str, Any]:
            mode = MaskMode.for_window(None, causal=launch.causal)
            return {
                **self._fixed(self.num_heads),
                "atten_mask": metadata.causal_template if mode.needs_template else None,
                "actual_seq_lengths": launch.query_lens_cumulative,
                "actual_seq_lengths_kv": launch.seq_lens,
                "block_table": launch.block_table,
                "sparse_mode": mode.sparse_mode,
                "block_size": metadata.block_size,
                "softmax_lse_flag": lse,
            }

        tensors = own_tensors((launch.gather(q_nope), launch.gather(q_pe)), caches)
        kind = (self.num_heads, self.scale, lse)
        result: tuple[torch.Tensor, torch.Tensor]
        result = launch.calls(fused_infer_attention_score, tensors, kind, fixed)
        return result
