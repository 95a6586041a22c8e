"""The latent backend's identity: its parts, its caches, and what it refuses."""

from __future__ import annotations

from typing import Any, ClassVar

from ascend_attn_ops import Refusal
from ascend_hwprofile import Capability, HardwareProfile

from ..latent_layout import ROPE_SIZE, SparseCacheShape
from ..masks import TEMPLATE_SIZE, MaskMode
from ..request import BackendRequest
from ..selection import unmet_demands
from ..sparse_refusals import operator_refusals, plain_cache_refusals, tensor
from .builder import AscendMLAMetadataBuilder
from .impl import AscendMLAImpl
from .metadata import AscendMLAMetadata


class AscendMLABackend:
    """Multi-head latent attention (DeepSeek-V2, DeepSeek-V3) over a paged latent cache.

    Prefill, chunked prefill, decode and verification of drafts are one absorbed call. 310P is
    refused, simulated too: no operator of that product computes this attention.
    """

    name: ClassVar[str] = "mla"
    metadata_class: ClassVar[type[AscendMLAMetadata]] = AscendMLAMetadata
    builder_class: ClassVar[type[AscendMLAMetadataBuilder]] = AscendMLAMetadataBuilder
    impl_class: ClassVar[type[AscendMLAImpl]] = AscendMLAImpl

    @staticmethod
    def cache_shape(num_blocks: int, block_size: int) -> SparseCacheShape:
        """Geometry of a layer's latent and rotary cache; there is no index cache."""
        return SparseCacheShape(num_blocks=num_blocks, block_size=block_size, has_indexer=False)

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
        return operator_refusals(cls.name, Capability.MLA, request, profile, smallest_step(request))


def smallest_step(request: BackendRequest, heads: int | None = None) -> dict[str, dict[str, Any]]:
    """Arguments of the two operators for one request with one token, as data.

    Args:
        request: The layer.
        heads: Query heads of the call; None means those of the request.
    """
    heads = request.num_heads if heads is None else heads
    latent, kv_heads = max(request.head_size - ROPE_SIZE, 1), request.num_kv_heads
    mode = MaskMode.for_window(None, causal=request.causal)
    flat, pages = (1, request.block_size), (1, request.block_size, kv_heads)
    template = {"shape": [TEMPLATE_SIZE, TEMPLATE_SIZE], "dtype": "int8"}
    attention = {
        "query": tensor(request, 1, heads, latent),
        "key": tensor(request, *flat, kv_heads * latent),
        "value": tensor(request, *flat, kv_heads * latent),
        "query_rope": tensor(request, 1, heads, ROPE_SIZE),
        "key_rope": tensor(request, *flat, kv_heads * ROPE_SIZE),
        "atten_mask": template if mode.needs_template else None,
        "actual_seq_lengths": [1],
        "actual_seq_lengths_kv": [1],
        "block_table": {"shape": [1, 1], "dtype": "int32"},
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "scale": request.head_size**-0.5,
        "input_layout": "TND",
        "sparse_mode": mode.sparse_mode,
        "block_size": request.block_size,
    }
    write = {
        "key": tensor(request, 1, kv_heads, latent),
        "value": tensor(request, 1, kv_heads, ROPE_SIZE),
        "key_cache": tensor(request, *pages, latent),
        "value_cache": tensor(request, *pages, ROPE_SIZE),
        "slot_mapping": {"shape": [1], "dtype": "int64"},
        "cache_mode": "Norm",
    }
    return {"fused_infer_attention_score": attention, "scatter_pa_kv_cache": write}
