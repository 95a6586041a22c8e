"""The latent backend (multi-head latent attention, absorbed, paged cache) for vLLM."""

from __future__ import annotations

from typing import Any, ClassVar

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
from ascend_attn_ops import PartialAttention
from ascend_vllm_plugin.adapters.latent import (
    Caches,
    LatentBackend,
    LatentImpl,
    LatentMetadataBuilder,
    Queries,
    SharedKeysImpl,
)
from ascend_vllm_plugin.adapters.shared_keys import shard_of


class MLAMetadataBuilder(LatentMetadataBuilder):
    """Metadata of the latent backend."""

    step_builder = AscendMLAMetadataBuilder


class MLAImpl(LatentImpl):
    """Translates the calls of an MLA layer for the latent backend."""

    backend: ClassVar[type[BackendClass]] = AscendMLABackend
    layer_class = AscendMLAImpl
    layer: AscendMLAImpl

    def attend(
        self, queries: Queries, caches: Caches, step: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over all keys."""
        output = queries[0].new_empty(queries[0].shape)
        return self.layer.forward_mqa(*queries, *caches, step, output), None


class MLABackend(LatentBackend):
    """What vLLM wants to know about the latent backend before it uses it."""

    impl_class: ClassVar[type[LatentImpl]] = MLAImpl
    builder_class: ClassVar[type[LatentMetadataBuilder]] = MLAMetadataBuilder

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Requests may be causal or not, one by one."""
        return True


class MLADcpMetadataBuilder(MLAMetadataBuilder):
    """Metadata over this rank's keys, with every token as a request of its own.

    vLLM gathers the heads before and merges the ranks after our part. Which keys of a shard a
    token may see follows no mask of the operators where a request has several tokens.
    """

    supports_non_causal_multi_token_dcp = True

    def build_step(self, batch: AttentionBatch) -> AscendMLAMetadata:
        """Our metadata of a step on this rank."""
        tokens = per_token_batch(batch, shard_of(self.vllm_config))
        metadata: AscendMLAMetadata = super().build_step(tokens)
        return metadata


class MLADcpImpl(SharedKeysImpl, MLAImpl):
    """Translates the calls of an MLA layer whose keys ranks share."""

    backend = AscendMlaDCPBackend

    def attend_partial(self, queries: Queries, caches: Caches, step: Any) -> PartialAttention:
        """Attention of the heads of all ranks over the keys of this one."""
        return self.layer.forward_mqa_partial(*queries, *caches, step)


class MLADcpBackend(MLABackend):
    """The latent backend where ranks share the keys of every request (decode context parallel)."""

    impl_class = MLADcpImpl
    builder_class = MLADcpMetadataBuilder


class MLAPcpImpl(MLAImpl):
    """Translates the calls of an MLA layer whose prompts ranks share."""

    backend = AscendMlaPCPBackend
    is_sparse = True
    supports_pcp = True


class MLAPcpBackend(MLABackend):
    """The latent backend where ranks share the tokens of prompts (prefill context parallel).

    vLLM spreads the tokens and gathers the rows that every rank writes into its cache, which has
    all keys; what is left is attention of this rank's tokens.
    """

    impl_class = MLAPcpImpl
