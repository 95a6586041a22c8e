"""The identity of the latent backend over shared keys: its parts and what it refuses."""

from __future__ import annotations

from typing import Any, ClassVar

from ascend_attn_ops import Refusal
from ascend_hwprofile import Capability, HardwareProfile

from ..latent_layout import SparseCacheShape
from ..mla.backend import smallest_step
from ..request import BackendRequest
from ..selection import unmet_demands
from ..sparse_refusals import operator_refusals, plain_cache_refusals
from .mla import AscendMlaDCPImpl, AscendMlaDCPMetadata, AscendMlaDCPMetadataBuilder

_ATTENTION = "fused_infer_attention_score"


class AscendMlaDCPBackend:
    """The latent backend where ranks share the keys of every request (decode context parallelism).

    It needs the lse of the operator beside ropes. The documents allow it and vllm-ascend uses it;
    the checker that CANN had in November 2025 refused it with 561002. Nothing here can tell which
    CANN will run, so the selection follows the documents.
    """

    name: ClassVar[str] = "mla_dcp"
    metadata_class: ClassVar[type[AscendMlaDCPMetadata]] = AscendMlaDCPMetadata
    builder_class: ClassVar[type[AscendMlaDCPMetadataBuilder]] = AscendMlaDCPMetadataBuilder
    impl_class: ClassVar[type[AscendMlaDCPImpl]] = AscendMlaDCPImpl

    @staticmethod
    def cache_shape(num_blocks: int, block_size: int) -> SparseCacheShape:
        """Geometry of the latent and rotary cache of a layer on one rank."""
        return SparseCacheShape(num_blocks=num_blocks, block_size=block_size, has_indexer=False)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why this backend does not take the request; empty when it does.

        ``request.num_heads`` are the heads of one rank; the operator is called with those of all.
        """
        refusals = unmet_demands(cls.name, request)
        refusals += plain_cache_refusals(cls.name, request)
        if request.context_parallel_size == 1:
            refusals.append(_one_rank_refusal(cls.name))
        if refusals:
            return refusals
        heads = request.num_heads * request.context_parallel_size
        steps = (_cache_step(request, heads), {_ATTENTION: _current_call(request)})
        found = [
            refusal
            for calls in steps
            for refusal in operator_refusals(cls.name, Capability.MLA, request, profile, calls)
        ]
        return list(dict.fromkeys(found))


def _one_rank_refusal(backend: str) -> Refusal:
    return Refusal(
        rule=f"{backend}.context_parallel_size",
        parameter="context_parallel_size",
        found="1",
        allowed="at least 2",
        source=f"{backend} backend: with one rank the mla backend does the same in one call",
    )


def _cache_step(request: BackendRequest, heads: int) -> dict[str, dict[str, Any]]:
    calls = smallest_step(request, heads)
    no_mask = {"atten_mask": None, "sparse_mode": 0, "softmax_lse_flag": True}
    return {**calls, _ATTENTION: calls[_ATTENTION] | no_mask}


def _current_call(request: BackendRequest) -> dict[str, Any]:
    call = smallest_step(request)[_ATTENTION]
    rows = {"key": "query", "value": "query", "key_rope": "query_rope"}
    keys = {
        name: {**call[query], "shape": [1, request.num_kv_heads, call[query]["shape"][-1]]}
        for name, query in rows.items()
    }
    return call | keys | {"block_table": None, "block_size": 0, "softmax_lse_flag": True}
