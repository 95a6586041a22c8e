"""The draft flash backend (draft layers with lengths that never leave the device) for vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from ascend_attn_backends import (
    AscendFlashAttentionBackend,
    AscendFlashAttentionMetadata,
    AscendFlashAttentionMetadataBuilder,
    PlanCache,
)
from ascend_attn_backends import AttentionBackend as BackendClass
from ascend_vllm_plugin.adapters.batch import attention_batch
from ascend_vllm_plugin.adapters.standard import StandardBackend, StandardImpl

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

PLANS = PlanCache()
"""Plans of every draft layer of this process: layers of one geometry share one plan per step."""


def plan_counters() -> Mapping[str, int]:
    """What the plan cache of this process has done: plans built, plans reused, plans dropped."""
    return {"builds": PLANS.builds, "hits": PLANS.hits, "evictions": PLANS.evictions}


class DraftFlashBackend(StandardBackend):
    """What vLLM wants to know about the draft flash backend before it uses it.

    Cache and mask are those of the standard backend; the causality of a step is one for all of its
    requests, and vLLM gives drafts no other.
    """

    @staticmethod
    def get_impl_cls() -> type[DraftFlashImpl]:
        """Per-layer part."""
        return DraftFlashImpl

    @staticmethod
    def get_builder_cls() -> type[DraftFlashMetadataBuilder]:  # type: ignore[override]
        """Per-step part."""
        return DraftFlashMetadataBuilder


class DraftFlashMetadataBuilder(AttentionMetadataBuilder[AscendFlashAttentionMetadata]):
    """Translates a step for the builder of the draft backend, which reads no length."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._builder = AscendFlashAttentionMetadataBuilder(
            block_size=kv_cache_spec.block_size, plans=PLANS
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> AscendFlashAttentionMetadata:
        """Metadata of one step; the lengths in it are device tensors, computed here once.

        vLLM's drafters have taken the rejected tokens out of the lengths already.

        Raises:
            ascend_attn_backends.AttentionBatchError: causality differs between requests.
        """
        return self._builder.build(attention_batch(common_attn_metadata, drafts_in_flight=True))


class DraftFlashImpl(StandardImpl):
    """Translates a draft layer's calls for the draft flash backend.

    Raises:
        LayerRefusedError: the layer has something that the backend does not compute.
    """

    backend: ClassVar[type[BackendClass]] = AscendFlashAttentionBackend
    opens_transfer_window = True
