"""The standard backend's identity: its parts, its cache, and what it refuses."""

from __future__ import annotations

from typing import Any, ClassVar

import ascend_attn_ops
from ascend_attn_ops import Refusal
from ascend_hwprofile import HardwareProfile

from ..kv_layout import PagedCacheShape
from ..masks import TEMPLATE_SIZE, MaskMode
from ..request import BackendRequest
from ..selection import unmet_demands
from .builder import AscendAttentionMetadataBuilder
from .impl import AscendAttentionBackendImpl
from .metadata import AscendMetadata

_OPERATORS = ("fused_infer_attention_score", "scatter_pa_kv_cache")
_HOST_PROVIDERS = ("cpu", "reference")


class AscendAttentionBackend:
    """Grouped-query and multi-head attention over a paged cache.

    Takes prefill, chunked prefill, prefix reuse, decode and verification of drafts in one batch,
    sliding windows, and requests that are not causal.
    """

    name: ClassVar[str] = "standard"
    metadata_class: ClassVar[type[AscendMetadata]] = AscendMetadata
    builder_class: ClassVar[type[AscendAttentionMetadataBuilder]] = AscendAttentionMetadataBuilder
    impl_class: ClassVar[type[AscendAttentionBackendImpl]] = AscendAttentionBackendImpl

    @staticmethod
    def cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> PagedCacheShape:
        """Geometry of a layer's key cache, and of its value cache."""
        return PagedCacheShape(num_blocks, num_kv_heads, block_size, head_size)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why this backend does not take the request; empty when it does.

        Architecture and features come from the table, limits of the product from the contracts of
        the two operators: the smallest step of such a layer is described and checked. On a product
        without these operators (310P, which has older ones) a host provider still computes the
        same attention, so a simulated request is judged by the bare contract there.
        """
        refusals = unmet_demands(cls.name, request)
        refusals += _cache_refusals(request)
        if not refusals:
            for op in _OPERATORS:
                refusals += ascend_attn_ops.check(
                    op,
                    smallest_step(request)[op],
                    _judged_profile(op, request, profile),
                    provider=request.provider,
                )
        return refusals


def _judged_profile(
    op: str, request: BackendRequest, profile: HardwareProfile
) -> HardwareProfile | None:
    missing = profile.operator(op).supported is False
    return None if missing and request.provider in _HOST_PROVIDERS else profile


def _cache_refusals(request: BackendRequest) -> list[Refusal]:
    if request.kv_cache_dtype in ("auto", request.dtype_name):
        return []
    return [
        Refusal(
            rule="standard.kv_cache_dtype",
            parameter="kv_cache_dtype",
            found=request.kv_cache_dtype,
            allowed=f"auto or {request.dtype_name}, the dtype of the layer",
            source="standard backend: keys and values are stored as they are computed",
        )
    ]


def smallest_step(request: BackendRequest) -> dict[str, dict[str, Any]]:
    """Arguments of the two operators for one request with one token, as data."""
    heads, kv_heads, size = request.num_heads, request.num_kv_heads, request.head_size
    mode = MaskMode.for_window(request.sliding_window, causal=request.causal)
    cache = _tensor(request, 1, request.block_size, kv_heads * size)
    pages = _tensor(request, 1, request.block_size, kv_heads, size)
    token = _tensor(request, 1, kv_heads, size)
    template = {"shape": [TEMPLATE_SIZE, TEMPLATE_SIZE], "dtype": "int8"}
    attention = {
        "query": _tensor(request, 1, heads, size),
        "key": cache,
        "value": cache,
        "atten_mask": template if mode.needs_template else None,
        "actual_seq_lengths": [1],
        "actual_seq_lengths_kv": [1],
        "block_table": {"shape": [1, 1], "dtype": "int32"},
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "scale": size**-0.5,
        "pre_tokens": mode.pre_tokens,
        "next_tokens": mode.next_tokens,
        "input_layout": "TND",
        "sparse_mode": mode.sparse_mode,
        "block_size": request.block_size,
    }
    write = {
        "key": token,
        "value": token,
        "key_cache": pages,
        "value_cache": pages,
        "slot_mapping": {"shape": [1], "dtype": "int64"},
        "cache_mode": "Norm",
    }
    return dict(zip(_OPERATORS, (attention, write), strict=True))


def _tensor(request: BackendRequest, *shape: int) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": request.dtype_name}
