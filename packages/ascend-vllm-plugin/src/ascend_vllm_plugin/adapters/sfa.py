"""The sparse latent backend (GLM-5, DeepSeek-V3.2) for vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ascend_attn_backends import (
    AscendSFABackend,
    AscendSFAImpl,
    AscendSFAMetadata,
    AscendSFAMetadataBuilder,
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


class SFABackend(LatentBackend):
    """What vLLM wants to know about the sparse latent backend before it uses it."""

    @staticmethod
    def get_impl_cls() -> type[SFAImpl]:
        """Per-layer part."""
        return SFAImpl

    @staticmethod
    def get_builder_cls() -> type[SFAMetadataBuilder]:
        """Per-step part."""
        return SFAMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        """An indexer chooses the keys of each token."""
        return True


class SFAMetadataBuilder(LatentMetadataBuilder):
    """Metadata of the sparse latent backend."""

    def build_step(self, batch: AttentionBatch) -> AscendSFAMetadata:
        """Our metadata of a step."""
        return AscendSFAMetadataBuilder(block_size=self.kv_cache_spec.block_size).build(batch)


class SFAImpl(LatentImpl):
    """Translates the calls of an MLA layer for the sparse latent backend.

    Args:
        topk_indices_buffer: [max_num_tokens, top_k] int32, where the indexer of this layer, or of
            an earlier one that shares its choice, leaves the positions that each token attends to.
    """

    is_sparse = True
    backend = AscendSFABackend
    layer_class = AscendSFAImpl
    layer: AscendSFAImpl

    def __init__(self, *args: Any, topk_indices_buffer: torch.Tensor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.topk_indices = topk_indices_buffer

    def record_logical_topk_ready(self) -> None:
        """The choice is in its buffer. vLLM tells this to layers that fetch keys ahead."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of absorbed queries over the keys that they chose.

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
        chosen, output = self.topk_indices[: nope.shape[0]], nope.new_empty(nope.shape)
        return self.layer.forward(nope, rope, *caches, chosen, attn_metadata.step, output), None
