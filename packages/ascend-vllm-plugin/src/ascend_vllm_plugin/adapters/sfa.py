"""The sparse latent backend (GLM-5, DeepSeek-V3.2) for vLLM."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ascend_attn_backends import (
    AscendSFABackend,
    AscendSFADCPBackend,
    AscendSFADCPMetadataBuilder,
    AscendSFAImpl,
    AscendSFAMetadataBuilder,
    AscendSFAPCPBackend,
    local_choice,
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
from ascend_vllm_plugin.adapters.shared_keys import SharedKeysMetadataBuilder


class SFAMetadataBuilder(LatentMetadataBuilder):
    """Metadata of the sparse latent backend."""

    step_builder = AscendSFAMetadataBuilder


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

    def attend(
        self, queries: Queries, caches: Caches, step: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over the chosen keys."""
        output = queries[0].new_empty(queries[0].shape)
        chosen = self._chosen(queries)
        return self.layer.forward(*queries, *caches, chosen, step, output), None

    def _chosen(self, queries: Queries) -> torch.Tensor:
        """[T, top_k] positions that each of this step's tokens attends to."""
        return self.topk_indices[: queries[0].shape[0]]


class SFABackend(LatentBackend):
    """What vLLM wants to know about the sparse latent backend before it uses it."""

    impl_class: ClassVar[type[LatentImpl]] = SFAImpl
    builder_class: ClassVar[type[LatentMetadataBuilder]] = SFAMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        """An indexer chooses the keys of each token."""
        return True


class SFADcpMetadataBuilder(SharedKeysMetadataBuilder, LatentMetadataBuilder):
    """Metadata over this rank's keys."""

    step_builder = AscendSFADCPMetadataBuilder


class SFADcpImpl(SharedKeysImpl, SFAImpl):
    """Translates the calls of an MLA layer with an indexer whose keys ranks share."""

    backend = AscendSFADCPBackend

    def attend_partial(self, queries: Queries, caches: Caches, step: Any) -> PartialAttention:
        """Attention of the heads of all ranks over the chosen keys that this one has."""
        chosen = local_choice(self._chosen(queries), step.dcp.shard)
        return self.layer.forward_partial(*queries, *caches, chosen, step)


class SFADcpBackend(SFABackend):
    """The sparse latent backend where ranks share the keys of every request."""

    impl_class = SFADcpImpl
    builder_class = SFADcpMetadataBuilder


class SFAPcpImpl(SFAImpl):
    """Translates the calls of an MLA layer with an indexer whose prompts ranks share."""

    backend = AscendSFAPCPBackend
    supports_pcp = True


class SFAPcpBackend(SFABackend):
    """The sparse latent backend where ranks share the tokens of prompts; see `MLAPcpBackend`."""

    impl_class = SFAPcpImpl
