"""What every backend of ours tells vLLM in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from ascend_vllm_plugin.compat import OUR_BACKEND_NAME

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImplBase

    from ascend_vllm_plugin.adapters.steps import StepMetadataBuilder


class AdaptedBackend(AttentionBackend):
    """What vLLM wants to know about a backend of ascend-attn-backends.

    Attributes:
        impl_class: per-layer part.
        builder_class: per-step part.
    """

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    impl_class: ClassVar[type[AttentionImplBase[Any]]]
    builder_class: ClassVar[type[StepMetadataBuilder]]

    @staticmethod
    def get_name() -> str:
        """Member of vLLM's `AttentionBackendEnum`."""
        return OUR_BACKEND_NAME

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImplBase[Any]]:
        """Per-layer part."""
        return cls.impl_class

    @classmethod
    def get_builder_cls(cls) -> type[StepMetadataBuilder]:
        """Per-step part."""
        return cls.builder_class

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        """Tokens per block (op-plugin docs npu_fused_infer_attention_score: multiples of 16)."""
        return [MultipleOf(16)]
