"""The latent backend (multi-head latent attention, absorbed, paged cache) for vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from ascend_attn_backends import (
    AscendMLABackend,
    AscendMlaDCPBackend,
    AscendMLAImpl,
    AscendMLAMetadata,
    AscendMLAMetadataBuilder,
    AscendMlaPCPBackend,
    AttentionBatch,
    per_token_batch,
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


class MLABackend(LatentBackend):
    """What vLLM wants to know about the latent backend before it uses it."""

    @staticmethod
    def get_impl_cls() -> type[MLAImpl]:
        """Per-layer part."""
        return MLAImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
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

    backend: ClassVar[type[BackendClass]] = AscendMLABackend
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


class MLADcpBackend(MLABackend):
    """The latent backend where ranks share the keys of every request (decode context parallel)."""

    @staticmethod
    def get_impl_cls() -> type[MLADcpImpl]:
        """Per-layer part."""
        return MLADcpImpl

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        """Per-step part."""
        return MLADcpMetadataBuilder


class MLADcpMetadataBuilder(LatentMetadataBuilder):
    """Metadata over this rank's keys, with every token as a request of its own.

    vLLM gathers the heads before and merges the ranks after our part. Which keys of a shard a
    token may see follows no mask of the operators where a request has several tokens.
    """

    supports_non_causal_multi_token_dcp = True

    def build_step(self, batch: AttentionBatch) -> AscendMLAMetadata:
        """Our metadata of a step on this rank."""
        builder = AscendMLAMetadataBuilder(block_size=self.kv_cache_spec.block_size)
        return builder.build(per_token_batch(batch, self.shard()))


class MLADcpImpl(MLAImpl):
    """Translates the calls of an MLA layer whose keys ranks share."""

    backend = AscendMlaDCPBackend
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
        """Attention of the heads of all ranks over the keys of this one.

        Returns:
            Latents [T, N, 512] and natural-log lse [T, N]; 0 and -inf where there are no keys.
        """
        nope, rope = self.split_query(q)
        caches = self.split_cache(kv_c_and_k_pe_cache)
        part = self.layer.forward_mqa_partial(nope, rope, *caches, attn_metadata.step)
        return self.padded(part, nope.shape[0])


class MLAPcpBackend(MLABackend):
    """The latent backend where ranks share the tokens of prompts (prefill context parallel).

    vLLM spreads the tokens and gathers the rows that every rank writes into its cache, which has
    all keys; what is left is attention of this rank's tokens.
    """

    @staticmethod
    def get_impl_cls() -> type[MLAPcpImpl]:
        """Per-layer part."""
        return MLAPcpImpl


class MLAPcpImpl(MLAImpl):
    """Translates the calls of an MLA layer whose prompts ranks share."""

    backend = AscendMlaPCPBackend
    is_sparse = True
    supports_pcp = True
