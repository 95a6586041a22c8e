"""The FA3 backend (attention as training computes it) for vLLM.

Nothing chooses it but `--additional-config '{"ascend": {"training_consistency": true}}'`.
"""

from __future__ import annotations

from typing import ClassVar

from ascend_attn_backends import AscendFABackend, AscendFAMetadataBuilder, BackendRequest
from ascend_attn_backends import AttentionBackend as BackendClass
from ascend_attn_ops import Refusal
from ascend_attn_ops.selection import HOST_PROVIDERS
from ascend_vllm_plugin.adapters.layer import refusal
from ascend_vllm_plugin.adapters.standard import StandardBackend, StandardImpl
from ascend_vllm_plugin.adapters.steps import StepMetadataBuilder


class FAMetadataBuilder(StepMetadataBuilder):
    """Translates a step for the builder of the FA3 backend, which reads no length."""

    step_builder = AscendFAMetadataBuilder


class FAImpl(StandardImpl):
    """Translates a layer's calls for the FA3 backend, where the product is simulated.

    On an NPU the kernels of flash-attn-npu take the distance between pages from the shape of the
    key cache. In vLLM's cache a key lies beside its value, so there is no such page.
    """

    backend: ClassVar[type[BackendClass]] = AscendFABackend

    def further_refusals(self, request: BackendRequest) -> list[Refusal]:
        """vLLM's cache cannot be read by the kernels of a product."""
        if request.provider in HOST_PROVIDERS:
            return []
        found = "vLLM's, whose rows hold a key and its value"
        allowed = "token-major pages of keys alone, which flash-attn-npu reads; or simulate mode"
        return [refusal(self.backend.name, "kv_cache", found, allowed)]


class FABackend(StandardBackend):
    """What vLLM wants to know about the FA3 backend before it uses it."""

    impl_class = FAImpl
    builder_class = FAMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """The kernels have no window."""
        return False
