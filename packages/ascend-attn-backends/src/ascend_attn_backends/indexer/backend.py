"""The indexer's identity: its parts, its cache, and what it refuses."""

from __future__ import annotations

from typing import Any, ClassVar

from ascend_attn_ops import Refusal
from ascend_hwprofile import Capability, HardwareProfile

from ..kv_layout import PagedCacheShape
from ..latent_layout import INDEX_SIZE, kernel_block_size_for
from ..request import BackendRequest
from ..sparse_refusals import operator_refusals, plain_cache_refusals, tensor
from .builder import AscendSFAIndexerMetadataBuilder
from .impl import AscendSFAIndexerImpl
from .metadata import AscendSFAIndexerMetadata


class AscendSFAIndexerBackend:
    """Choice of keys for :class:`AscendSFABackend`, over a paged cache of index keys.

    It is no attention layer of its own, so the table of attention layers does not list it; ask
    :meth:`refusals` with the index heads as ``num_heads`` and 128 as ``head_size``.
    """

    name: ClassVar[str] = "sfa_indexer"
    metadata_class: ClassVar[type[AscendSFAIndexerMetadata]] = AscendSFAIndexerMetadata
    builder_class: ClassVar[type[AscendSFAIndexerMetadataBuilder]] = AscendSFAIndexerMetadataBuilder
    impl_class: ClassVar[type[AscendSFAIndexerImpl]] = AscendSFAIndexerImpl

    @staticmethod
    def cache_shape(num_blocks: int, block_size: int) -> PagedCacheShape:
        """Geometry of a layer's index cache."""
        return PagedCacheShape(num_blocks, 1, block_size, INDEX_SIZE)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why the indexer does not take the request; empty when it does.

        Limits of the product come from the contracts of the operators, for the smallest step.
        """
        refusals = plain_cache_refusals(cls.name, request)
        refusals += operator_refusals(
            cls.name, Capability.LIGHTNING_INDEXER, request, profile, _smallest_step(request)
        )
        return refusals


def _smallest_step(request: BackendRequest) -> dict[str, dict[str, Any]]:
    """Arguments of the two operators for one request with one token, as data."""
    heads, kv_heads, size = request.num_heads, request.num_kv_heads, request.head_size
    kernel = request.block_size
    if kernel % 16 == 0:
        kernel = kernel_block_size_for(kernel)
    cache = tensor(request, 1, kernel, kv_heads, size)
    row = tensor(request, 1, kv_heads, size)
    choose = {
        "query": tensor(request, 1, heads, size),
        "key": cache,
        "weights": tensor(request, 1, heads),
        "actual_seq_lengths_query": {"shape": [1], "dtype": "int32"},
        "actual_seq_lengths_key": {"shape": [1], "dtype": "int32"},
        "block_table": {"shape": [1, 1], "dtype": "int32"},
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_mode": 3 if request.causal else 0,
    }
    write = {
        "key": row,
        "value": row,
        "key_cache": cache,
        "value_cache": cache,
        "slot_mapping": {"shape": [1], "dtype": "int64"},
        "cache_mode": "Norm",
    }
    return {"lightning_indexer": choose, "scatter_pa_kv_cache": write}
