"""The draft flash backend (draft layers with lengths that never leave the device) for vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ascend_attn_backends import (
    AscendFlashAttentionBackend,
    AscendFlashAttentionMetadataBuilder,
    PlanCache,
)
from ascend_attn_backends import AttentionBackend as BackendClass
from ascend_vllm_plugin.adapters.batch import attention_batch
from ascend_vllm_plugin.adapters.standard import StandardBackend, StandardImpl
from ascend_vllm_plugin.adapters.steps import StepMetadataBuilder

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from ascend_attn_backends import AttentionBatch

PLANS = PlanCache()
"""Plans of every draft layer of this process: layers of one geometry share one plan per step."""


def plan_counters() -> Mapping[str, int]:
    """What the plan cache of this process has done: plans built, plans reused, plans dropped."""
    return {"builds": PLANS.builds, "hits": PLANS.hits, "evictions": PLANS.evictions}


class DraftFlashMetadataBuilder(StepMetadataBuilder):
    """Translates a step for the builder of the draft backend, which reads no length.

    vLLM's drafters have taken the rejected tokens out of the lengths already, which only the device
    knows. Causality must be one for all requests (`ascend_attn_backends.AttentionBatchError`).
    """

    step_builder = AscendFlashAttentionMetadataBuilder

    def builder_arguments(self) -> Mapping[str, Any]:
        """The plans of this process."""
        return {"plans": PLANS}

    def batch_of(self, common: CommonAttentionMetadata) -> AttentionBatch:
        """The step as a batch, its lengths on the device alone."""
        return attention_batch(common, drafts_in_flight=True)


class DraftFlashImpl(StandardImpl):
    """Translates a draft layer's calls for the draft flash backend.

    Raises:
        LayerRefusedError: the layer has something that the backend does not compute.
    """

    backend: ClassVar[type[BackendClass]] = AscendFlashAttentionBackend
    opens_transfer_window = True


class DraftFlashBackend(StandardBackend):
    """What vLLM wants to know about the draft flash backend before it uses it.

    Cache and mask are those of the standard backend; the causality of a step is one for all of its
    requests, and vLLM gives drafts no other.
    """

    impl_class = DraftFlashImpl
    builder_class = DraftFlashMetadataBuilder
