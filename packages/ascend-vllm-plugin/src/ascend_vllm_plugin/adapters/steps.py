"""What every adapter does once per step: translate it for a builder of ascend-attn-backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from ascend_vllm_plugin.adapters.batch import attention_batch, drafts_in_flight

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

    from ascend_attn_backends import AttentionBatch


class StepMetadataBuilder(AttentionMetadataBuilder[Any]):
    """Translates a step of vLLM for a builder of ascend-attn-backends.

    Attributes:
        step_builder: that builder's class.
    """

    step_builder: ClassVar[type[Any]]

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._builder = self.step_builder(
            block_size=kv_cache_spec.block_size, **self.builder_arguments()
        )
        self._drafts_in_flight = drafts_in_flight(vllm_config)

    def builder_arguments(self) -> Mapping[str, Any]:
        """What the builder is told beside the size of a block."""
        return {}

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Metadata of one step.

        A prefix common to the batch (cascade attention) is not made use of: vLLM asks a builder
        before it uses it, and these say no.
        """
        return self.build_step(self.batch_of(common_attn_metadata))

    def batch_of(self, common: CommonAttentionMetadata) -> AttentionBatch:
        """The step as a batch."""
        return attention_batch(common, drafts_in_flight=self._drafts_in_flight)

    def build_step(self, batch: AttentionBatch) -> Any:
        """Our metadata of a step."""
        return self._builder.build(batch)
