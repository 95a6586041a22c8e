"""The latent backend (multi-head latent attention, absorbed, paged cache) for vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ascend_attn_backends import (
    AscendMLABackend,
    AscendMLAImpl,
    AscendMLAMetadata,
    AscendMLAMetadataBuilder,
    AttentionBatch,
)
from ascend_vllm_plugin.adapters.latent import (
    LatentBackend,
    LatentImpl,
    LatentMetadata,
    LatentMetadataBuilder,
)

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer


class MLABackend(LatentBackend):
    """What vLLM wants to know about the latent backend before it uses it."""

    @staticmethod
    def get_impl_cls() -> type[MLAImpl]:
        """Per-layer part."""
        return MLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLAMetadataBuilder]:
        """Per-step part."""
        return MLAMetadataBuilder

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Requests may be causal or not, one by one."""
        return True


class MLAMetadataBuilder(LatentMetadataBuilder):
    """Metadata of the latent backend."""

    def build_step(self, batch: AttentionBatch) -> AscendMLAMetadata:
        """Our metadata of a step."""
        return AscendMLAMetadataBuilder(block_size=self.kv_cache_spec.block_size).build(batch)


class MLAImpl(LatentImpl):
    """Translates the calls of an MLA layer for the latent backend."""

    backend = AscendMLABackend
    layer_class = AscendMLAImpl
    layer: AscendMLAImpl

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of absorbed queries over the cache.

        Args:
            q: [T, N, 512] absorbed and [T, N, 64] rotated queries, or both joined.
            kv_c_and_k_pe_cache: [num_blocks, block_size, 576].
            attn_metadata: of this step.
            layer: unused.

        Returns:
            Latents [T, N, 512], 0 in rows of padding, and None for the lse.
        """
        nope, rope = self.split_query(q)
        caches = self.split_cache(kv_c_and_k_pe_cache)
        output = nope.new_empty(nope.shape)
        return self.layer.forward_mqa(nope, rope, *caches, attn_metadata.step, output), None
