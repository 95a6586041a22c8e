"""The compressed backend over shared keys: its parts and what it refuses."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ascend_attn_ops import Refusal
from ascend_hwprofile import HardwareProfile

from ..dsa import AscendDSABackend, DsaCacheShape, DsaCompression
from ..request import BackendRequest
from ..selection import unmet_demands
from ..sparse_refusals import plain_cache_refusals
from .dsa import AscendDSADCPImpl, AscendDSADCPMetadata, AscendDSADCPMetadataBuilder
from .refusals import gathered_heads


class AscendDSADCPBackend:
    """The compressed backend where ranks share the compressed keys of every request.

    The window and the states of the compressors are on every rank; see
    :mod:`ascend_attn_backends.context_parallel.dsa`.
    """

    name: ClassVar[str] = "dsa_dcp"
    metadata_class: ClassVar[type[AscendDSADCPMetadata]] = AscendDSADCPMetadata
    builder_class: ClassVar[type[AscendDSADCPMetadataBuilder]] = AscendDSADCPMetadataBuilder
    impl_class: ClassVar[type[AscendDSADCPImpl]] = AscendDSADCPImpl

    @staticmethod
    def cache_shape(
        num_blocks: int, block_size: int, compression: DsaCompression | None = None
    ) -> DsaCacheShape:
        """Geometry of the caches of a layer on one rank."""
        return DsaCacheShape.of_layer(num_blocks, block_size, compression)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why this backend does not take the request; empty when it does.

        ``request.num_heads`` are the heads of one rank; over the window the operator is called with
        these, over compressed keys with those of all ranks.
        """
        refusals = unmet_demands(cls.name, request)
        refusals += plain_cache_refusals(cls.name, request)
        if refusals:
            return refusals
        alone = attrs.evolve(request, context_parallel_size=1)
        calls = {request.num_heads: alone, gathered_heads(request): alone}
        found = [
            refusal
            for heads, one in calls.items()
            for refusal in AscendDSABackend.refusals(attrs.evolve(one, num_heads=heads), profile)
        ]
        return list(dict.fromkeys(found))
