"""The sparse latent backend (GLM-5, DeepSeek-V3.2) for vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ascend_attn_backends import (
    AscendSFABackend,
    AscendSFADCPBackend,
    AscendSFADCPMetadata,
    AscendSFADCPMetadataBuilder,
    AscendSFAImpl,
    AscendSFAMetadata,
    AscendSFAMetadataBuilder,
    AscendSFAPCPBackend,
    AttentionBatch,
    local_choice,
)
from ascend_attn_backends import AttentionBackend as BackendClass
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
    def get_builder_cls() -> type[LatentMetadataBuilder]:
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
    use_sparse = True
    backend: ClassVar[type[BackendClass]] = AscendSFABackend
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


class SFADcpBackend(SFABackend):
    """The sparse latent backend where ranks share the keys of every request."""

    @staticmethod
    def get_impl_cls() -> type[SFADcpImpl]:
        """Per-layer part."""
        return SFADcpImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        """Per-step part."""
        return SFADcpMetadataBuilder


class SFADcpMetadataBuilder(LatentMetadataBuilder):
    """Metadata over this rank's keys."""

    def build_step(self, batch: AttentionBatch) -> AscendSFADCPMetadata:
        """Our metadata of a step on this rank."""
        block_size = self.kv_cache_spec.block_size
        return AscendSFADCPMetadataBuilder(block_size=block_size, shard=self.shard()).build(batch)


class SFADcpImpl(SFAImpl):
    """Translates the calls of an MLA layer with an indexer whose keys ranks share."""

    backend = AscendSFADCPBackend
    supports_dcp = True
    can_return_lse_for_decode = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the heads of all ranks over the chosen keys that this one has.

        Returns:
            Latents [T, N, 512] and natural-log lse [T, N]; 0 and -inf where there are no keys.
        """
        nope, rope = self.split_query(q)
        caches, step = self.split_cache(kv_c_and_k_pe_cache), attn_metadata.step
        chosen = local_choice(self.topk_indices[: nope.shape[0]], step.dcp.shard)
        part = self.layer.forward_partial(nope, rope, *caches, chosen, step)
        return self.padded(part, nope.shape[0])


class SFAPcpBackend(SFABackend):
    """The sparse latent backend where ranks share the tokens of prompts; see `MLAPcpBackend`."""

    @staticmethod
    def get_impl_cls() -> type[SFAPcpImpl]:
        """Per-layer part."""
        return SFAPcpImpl


class SFAPcpImpl(SFAImpl):
    """Translates the calls of an MLA layer with an indexer whose prompts ranks share."""

    backend = AscendSFAPCPBackend
    supports_pcp = True
