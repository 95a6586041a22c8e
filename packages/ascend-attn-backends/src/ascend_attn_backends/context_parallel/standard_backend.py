"""The standard backend over shared keys: its parts and what it refuses."""

from __future__ import annotations

from typing import Any, ClassVar

import ascend_attn_ops
from ascend_attn_ops import Refusal
from ascend_hwprofile import HardwareProfile

from ..errors import InvalidFieldError
from ..kv_layout import PagedCacheShape
from ..request import BackendRequest
from ..selection import unmet_demands
from ..sparse_refusals import plain_cache_refusals, tensor
from ..standard.backend import smallest_step
from .refusals import gathered_heads
from .standard import (
    AscendAttentionDCPImpl,
    AscendAttentionDCPMetadata,
    AscendAttentionDCPMetadataBuilder,
    kv_heads_of_rank,
)

_ATTENTION, _WRITE = "fused_infer_attention_score", "scatter_pa_kv_cache"


class AscendAttentionDCPBackend:
    """The standard backend where ranks share the keys of every request.

    Each rank has a share of the query heads and all key/value heads. A sliding window is refused:
    it begins at another place of each shard for every request and rank, which no mask mode says.
    310P is refused, simulated too: its operators return no lse.
    """

    name: ClassVar[str] = "standard_dcp"
    metadata_class: ClassVar[type[AscendAttentionDCPMetadata]] = AscendAttentionDCPMetadata
    builder_class: ClassVar[type[AscendAttentionDCPMetadataBuilder]]
    builder_class = AscendAttentionDCPMetadataBuilder
    impl_class: ClassVar[type[AscendAttentionDCPImpl]] = AscendAttentionDCPImpl

    @staticmethod
    def cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> PagedCacheShape:
        """Geometry of a layer's key cache on one rank, and of its value cache."""
        return PagedCacheShape(num_blocks, num_kv_heads, block_size, head_size)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why this backend does not take the request; empty when it does.

        ``request.num_heads`` are the query heads of one rank, ``request.num_kv_heads`` the
        key/value heads that every rank has.
        """
        refusals = unmet_demands(cls.name, request)
        refusals += plain_cache_refusals(cls.name, request)
        refusals += _head_refusals(cls.name, request)
        if refusals:
            return refusals
        calls = [(_ATTENTION, _cache_call(request)), (_ATTENTION, _current_call(request))]
        calls.append((_WRITE, smallest_step(request)[_WRITE]))
        found = [
            refusal
            for op, arguments in calls
            for refusal in ascend_attn_ops.check(op, arguments, profile, provider=request.provider)
        ]
        return list(dict.fromkeys(found))


def _head_refusals(backend: str, request: BackendRequest) -> list[Refusal]:
    heads, kv_heads = gathered_heads(request), request.num_kv_heads
    found = f"{request.num_heads} heads on each of {request.context_parallel_size} ranks"
    allowed = None
    if heads % kv_heads:
        allowed = f"a multiple of {kv_heads} heads on all ranks, as many as key/value heads"
    else:
        try:
            kv_heads_of_rank(request.num_heads, kv_heads, 0, request.context_parallel_size)
        except InvalidFieldError as error:
            allowed = error.allowed
    if allowed is None:
        return []
    return [
        Refusal(
            rule=f"{backend}.num_heads",
            parameter="num_heads",
            found=found,
            allowed=allowed,
            source=f"{backend} backend: over this step's keys a rank attends with its own heads",
        )
    ]


def _cache_call(request: BackendRequest) -> dict[str, Any]:
    """Over a share of the keys: the heads of all ranks and no mask."""
    heads = gathered_heads(request)
    return smallest_step(request)[_ATTENTION] | {
        "query": tensor(request, 1, heads, request.head_size),
        "num_heads": heads,
        "atten_mask": None,
        "sparse_mode": 0,
        "softmax_lse_flag": True,
    }


def _current_call(request: BackendRequest) -> dict[str, Any]:
    """Over the keys of this step, which are not paged, with a rank's own heads."""
    ranks = request.context_parallel_size
    own = kv_heads_of_rank(request.num_heads, request.num_kv_heads, 0, ranks)
    rows = tensor(request, 1, own.stop, request.head_size)
    return smallest_step(request)[_ATTENTION] | {
        "key": rows,
        "value": rows,
        "num_key_value_heads": own.stop,
        "block_table": None,
        "block_size": 0,
        "softmax_lse_flag": True,
    }
