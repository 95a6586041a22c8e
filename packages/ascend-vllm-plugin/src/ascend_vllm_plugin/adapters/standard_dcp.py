"""The standard backend where ranks share the keys of every request, for vLLM.

Dense layers gather the query heads of all ranks and merge the ranks' parts themselves, here as in
vLLM's own backends; that is what the backend's layer does over vLLM's group of ranks. Each rank has
its share of the query heads, and the key/value heads that they use: vLLM takes no more ranks for
one request than a key/value head has copies.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.distributed import get_dcp_group

from ascend_attn_backends import (
    AscendAttentionDCPBackend,
    AscendAttentionDCPImpl,
    AscendAttentionDCPMetadata,
    AscendAttentionDCPMetadataBuilder,
    BackendRequest,
    KeyValueRankStep,
    TorchDCPGroup,
)
from ascend_attn_backends import AttentionBackend as BackendClass
from ascend_attn_ops import Refusal
from ascend_vllm_plugin.adapters.shared_keys import (
    SharedKeysFacts,
    SharedKeysMetadataBuilder,
    runner_refusals,
)
from ascend_vllm_plugin.adapters.standard import StandardBackend, StandardImpl


class StandardDcpMetadataBuilder(SharedKeysMetadataBuilder):
    """Metadata over this rank's keys."""

    step_builder = AscendAttentionDCPMetadataBuilder


class StandardDcpImpl(SharedKeysFacts, StandardImpl):
    """Translates the calls of a layer whose keys ranks share."""

    backend: ClassVar[type[BackendClass]] = AscendAttentionDCPBackend

    def further_refusals(self, request: BackendRequest) -> list[Refusal]:
        """The model runner must spread the keys."""
        return runner_refusals(self.backend.name, request)

    def make_impl(self) -> AscendAttentionDCPImpl:
        """The layer of the backend, over vLLM's ranks."""
        ranks = TorchDCPGroup(get_dcp_group().device_group)
        return AscendAttentionDCPImpl(
            self.num_heads, self.head_size, self.scale, self.num_kv_heads, ranks
        )

    def attend(
        self,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        caches: tuple[torch.Tensor, torch.Tensor],
        metadata: AscendAttentionDCPMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of this rank's heads over the keys of all ranks; every rank calls it."""
        query, key, value = rows
        step = KeyValueRankStep(
            query=query,
            key=key,
            value=value,
            key_cache=caches[0],
            value_cache=caches[1],
            metadata=metadata,
        )
        result: torch.Tensor = self._impl.forward(step, output)
        return result


class StandardDcpBackend(StandardBackend):
    """What vLLM wants to know about the backend before it uses it."""

    impl_class = StandardDcpImpl
    builder_class = StandardDcpMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """On a shard a window begins at another key for each request and rank."""
        return False
