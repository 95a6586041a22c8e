"""The latent backends over shared keys: their parts and what they refuse."""

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
from .mla_pcp import AscendMlaPCPImpl, AscendMlaPCPMetadata, AscendMlaPCPMetadataBuilder
from .refusals import gathered_heads, uneven_refusals

_ATTENTION = "fused_infer_attention_score"
Calls = dict[str, dict[str, Any]]


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
        steps = [_cache_step(request), _current_step(request)]
        return refusals or _refused_steps(cls.name, request, profile, steps)


class AscendMlaPCPBackend:
    """The latent backend where ranks share the tokens of every prefill, and perhaps the keys.

    As :class:`AscendMlaDCPBackend` it needs the lse of the operator beside ropes.
    """

    name: ClassVar[str] = "mla_pcp"
    metadata_class: ClassVar[type[AscendMlaPCPMetadata]] = AscendMlaPCPMetadata
    builder_class: ClassVar[type[AscendMlaPCPMetadataBuilder]] = AscendMlaPCPMetadataBuilder
    impl_class: ClassVar[type[AscendMlaPCPImpl]] = AscendMlaPCPImpl

    @staticmethod
    def cache_shape(num_blocks: int, block_size: int) -> SparseCacheShape:
        """Geometry of the latent and rotary cache of a layer on one rank."""
        return SparseCacheShape(num_blocks=num_blocks, block_size=block_size, has_indexer=False)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why this backend does not take the request; empty when it does.

        ``request.num_heads`` are the heads of one rank. Ranks that share tokens have the same
        heads, the other ``context_parallel_size / prefill_context_parallel_size`` share them.
        """
        refusals = unmet_demands(cls.name, request)
        refusals += plain_cache_refusals(cls.name, request)
        refusals += uneven_refusals(cls.name, request)
        steps = [_cache_step(request), _current_step(request), _whole_step(request)]
        return refusals or _refused_steps(cls.name, request, profile, steps)


def _refused_steps(
    backend: str, request: BackendRequest, profile: HardwareProfile, steps: list[Calls]
) -> list[Refusal]:
    found = [
        refusal
        for calls in steps
        for refusal in operator_refusals(backend, Capability.MLA, request, profile, calls)
    ]
    return list(dict.fromkeys(found))


def _cache_step(request: BackendRequest) -> Calls:
    """Over a share of the keys: the heads of all ranks and no mask."""
    calls = smallest_step(request, gathered_heads(request))
    no_mask = {"atten_mask": None, "sparse_mode": 0, "softmax_lse_flag": True}
    return {**calls, _ATTENTION: calls[_ATTENTION] | no_mask}


def _current_step(request: BackendRequest) -> Calls:
    """Over the keys of this rank's own tokens, which are not paged."""
    call = smallest_step(request)[_ATTENTION]
    rows = {"key": "query", "value": "query", "key_rope": "query_rope"}
    keys = {
        name: {**call[query], "shape": [1, request.num_kv_heads, call[query]["shape"][-1]]}
        for name, query in rows.items()
    }
    unpaged = {"block_table": None, "block_size": 0, "softmax_lse_flag": True}
    return {_ATTENTION: call | keys | unpaged}


def _whole_step(request: BackendRequest) -> Calls:
    """Over all keys, where each rank has them."""
    return {_ATTENTION: smallest_step(request)[_ATTENTION] | {"softmax_lse_flag": True}}
