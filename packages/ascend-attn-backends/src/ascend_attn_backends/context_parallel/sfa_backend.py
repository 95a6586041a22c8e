"""The sparse latent backends over shared keys: their parts and what they refuse."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from ascend_attn_ops import Refusal
from ascend_hwprofile import Capability, HardwareProfile

from ..latent_layout import SparseCacheShape
from ..request import BackendRequest
from ..selection import unmet_demands
from ..sfa.backend import smallest_step
from ..sparse_refusals import operator_refusals, plain_cache_refusals
from .refusals import gathered_heads, uneven_refusals
from .sfa import AscendSFADCPImpl, AscendSFADCPMetadata, AscendSFADCPMetadataBuilder
from .sfa_pcp import AscendSFAPCPImpl, AscendSFAPCPMetadata, AscendSFAPCPMetadataBuilder

_ATTENTION = "sparse_flash_attention"


class AscendSFADCPBackend:
    """The sparse latent backend where ranks share the keys of every request.

    It asks the operator for softmax statistics over a paged cache. vllm-ascend does so for the same
    purpose, although the documents call them a feature of training; the contract takes them.
    """

    name: ClassVar[str] = "sfa_dcp"
    metadata_class: ClassVar[type[AscendSFADCPMetadata]] = AscendSFADCPMetadata
    builder_class: ClassVar[type[AscendSFADCPMetadataBuilder]] = AscendSFADCPMetadataBuilder
    impl_class: ClassVar[type[AscendSFADCPImpl]] = AscendSFADCPImpl

    @staticmethod
    def cache_shape(num_blocks: int, block_size: int) -> SparseCacheShape:
        """Geometry of the caches, on one rank, of a layer that has its own indexer."""
        return SparseCacheShape(num_blocks=num_blocks, block_size=block_size)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why this backend does not take the request; empty when it does.

        ``request.num_heads`` are the heads of one rank; the operator is called with those of all.
        """
        refusals = unmet_demands(cls.name, request)
        refusals += plain_cache_refusals(cls.name, request)
        return refusals or _refused_calls(cls.name, request, profile)


class AscendSFAPCPBackend:
    """The sparse latent backend where ranks share the tokens of every prefill, and perhaps keys.

    As :class:`AscendSFADCPBackend` it asks for softmax statistics over a paged cache.
    """

    name: ClassVar[str] = "sfa_pcp"
    metadata_class: ClassVar[type[AscendSFAPCPMetadata]] = AscendSFAPCPMetadata
    builder_class: ClassVar[type[AscendSFAPCPMetadataBuilder]] = AscendSFAPCPMetadataBuilder
    impl_class: ClassVar[type[AscendSFAPCPImpl]] = AscendSFAPCPImpl

    @staticmethod
    def cache_shape(num_blocks: int, block_size: int) -> SparseCacheShape:
        """Geometry of the caches, on one rank, of a layer that has its own indexer."""
        return SparseCacheShape(num_blocks=num_blocks, block_size=block_size)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why this backend does not take the request; empty when it does.

        ``request.num_heads`` are the heads of one rank. Ranks that share tokens have the same
        heads, the other ``context_parallel_size / prefill_context_parallel_size`` share them.
        """
        refusals = unmet_demands(cls.name, request)
        refusals += plain_cache_refusals(cls.name, request)
        refusals += uneven_refusals(cls.name, request)
        return refusals or _refused_calls(cls.name, request, profile)


def _refused_calls(
    backend: str, request: BackendRequest, profile: HardwareProfile
) -> list[Refusal]:
    calls: dict[str, dict[str, Any]]
    calls = smallest_step(attrs.evolve(request, num_heads=gathered_heads(request)))
    calls[_ATTENTION] |= {"sparse_mode": 0, "return_softmax_lse": True}
    capability = Capability.SPARSE_FLASH_ATTENTION
    return operator_refusals(backend, capability, request, profile, calls)
