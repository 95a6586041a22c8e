"""The sparse latent backend's identity: its parts, its caches, and what it refuses."""

from __future__ import annotations

from typing import Any, ClassVar

from ascend_attn_ops import Refusal
from ascend_hwprofile import Capability, HardwareProfile

from ..latent_layout import LATENT_SIZE, ROPE_SIZE, SparseCacheShape, kernel_block_size_for
from ..request import BackendRequest
from ..selection import unmet_demands
from ..sparse_refusals import operator_refusals, plain_cache_refusals, tensor
from .builder import AscendSFAMetadataBuilder
from .impl import AscendSFAImpl
from .metadata import AscendSFAMetadata


class AscendSFABackend:
    """Sparse multi-head latent attention (GLM-5, DeepSeek-V3.2) over a paged latent cache.

    An indexer (:class:`AscendSFAIndexerBackend`) chooses the keys of each token; this backend
    attends over them. Prefill, chunked prefill, decode and verification of drafts are one call with
    lengths that stay on the device. 310P is refused, simulated too: no operator of that product
    computes this attention, so a simulation would show what cannot run.
    """

    name: ClassVar[str] = "sfa"
    metadata_class: ClassVar[type[AscendSFAMetadata]] = AscendSFAMetadata
    builder_class: ClassVar[type[AscendSFAMetadataBuilder]] = AscendSFAMetadataBuilder
    impl_class: ClassVar[type[AscendSFAImpl]] = AscendSFAImpl

    @staticmethod
    def cache_shape(num_blocks: int, block_size: int) -> SparseCacheShape:
        """Geometry of the caches of a layer that has its own indexer."""
        return SparseCacheShape(num_blocks=num_blocks, block_size=block_size)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why this backend does not take the request; empty when it does.

        ``request.head_size`` is the width of a cached token: 512 latent and 64 rotary elements.
        Limits of the product come from the contracts of the operators, for the smallest step.
        """
        refusals = unmet_demands(cls.name, request)
        refusals += plain_cache_refusals(cls.name, request)
        if refusals:
            return refusals
        return operator_refusals(
            cls.name, Capability.SPARSE_FLASH_ATTENTION, request, profile, smallest_step(request)
        )


def smallest_step(request: BackendRequest) -> dict[str, dict[str, Any]]:
    """Arguments of the two operators for one request with one token, as data."""
    heads, latent = request.num_heads, max(request.head_size - ROPE_SIZE, 1)
    kernel = request.block_size
    if kernel % 16 == 0:
        kernel = kernel_block_size_for(kernel)
    pages, kv_heads = (1, kernel, request.num_kv_heads), request.num_kv_heads
    attention = {
        "query": tensor(request, 1, heads, latent),
        "key": tensor(request, *pages, latent),
        "value": tensor(request, *pages, latent),
        "sparse_indices": {"shape": [1, kv_heads, LATENT_SIZE], "dtype": "int32"},
        "scale_value": request.head_size**-0.5,
        "block_table": {"shape": [1, 1], "dtype": "int32"},
        "actual_seq_lengths_query": {"shape": [1], "dtype": "int32"},
        "actual_seq_lengths_kv": {"shape": [1], "dtype": "int32"},
        "query_rope": tensor(request, 1, heads, ROPE_SIZE),
        "key_rope": tensor(request, *pages, ROPE_SIZE),
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "sparse_mode": 3 if request.causal else 0,
        "attention_mode": 2,
    }
    write = {
        "key": tensor(request, 1, kv_heads, latent),
        "value": tensor(request, 1, kv_heads, ROPE_SIZE),
        "key_cache": tensor(request, *pages, latent),
        "value_cache": tensor(request, *pages, ROPE_SIZE),
        "slot_mapping": {"shape": [1], "dtype": "int64"},
        "cache_mode": "Norm",
    }
    return {"sparse_flash_attention": attention, "scatter_pa_kv_cache": write}
