"""The FA3 backend's identity: its parts, its cache, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import ascend_attn_ops
from ascend_attn_ops import Refusal
from ascend_attn_ops.selection import HOST_PROVIDERS
from ascend_hwprofile import HardwareProfile

from ..kv_layout import PagedCacheShape
from ..request import BackendRequest
from ..selection import unmet_demands
from ..sparse_refusals import plain_cache_refusals
from ..standard.backend import smallest_step
from .builder import AscendFAMetadataBuilder
from .impl import AscendFAImpl
from .metadata import AscendFAMetadata
from .package import facts, missing_package

_WRITE = "scatter_pa_kv_cache"


class AscendFABackend:
    """The flash attention that training uses (flash-attn-npu), for reinforcement learning.

    It replaces ``standard`` where training consistency is asked for, and only there. Takes prefill,
    chunked prefill, prefix reuse, decode and verification of drafts in one batch.
    """

    name: ClassVar[str] = "fa3"
    metadata_class: ClassVar[type[AscendFAMetadata]] = AscendFAMetadata
    builder_class: ClassVar[type[AscendFAMetadataBuilder]] = AscendFAMetadataBuilder
    impl_class: ClassVar[type[AscendFAImpl]] = AscendFAImpl

    @staticmethod
    def cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> PagedCacheShape:
        """Geometry of a layer's key cache, and of its value cache."""
        return PagedCacheShape(num_blocks, num_kv_heads, block_size, head_size)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why this backend does not take the request; empty when it does.

        Architecture and features come from the table, limits from ``package.toml``, and writing the
        cache from the contract of its operator. Whether flash-attn-npu is installed is asked unless
        a host provider simulates the product; nothing is imported for it.
        """
        refusals = unmet_demands(cls.name, request)
        refusals += plain_cache_refusals(cls.name, request)
        refusals += _package_refusals(request, profile)
        if refusals:
            return refusals
        return ascend_attn_ops.check(
            _WRITE, smallest_step(request)[_WRITE], profile, provider=request.provider
        )


def _package_refusals(request: BackendRequest, profile: HardwareProfile) -> Iterator[Refusal]:
    limits, simulated = facts()["limits"], request.provider in HOST_PROVIDERS
    sizes = limits["block_size"].get(profile.family.value)
    if sizes is None:
        families = [key for key in limits["block_size"] if key != "source"]
        yield _refusal(
            "product", "profile", profile.soc_name, " or ".join(families), limits["block_size"]
        )
    elif request.block_size not in sizes:
        allowed = " or ".join(map(str, sizes))
        yield _refusal(
            "block_size", "block_size", str(request.block_size), allowed, limits["block_size"]
        )
    if request.head_size > limits["head_size"]["most"]:
        allowed = f"at most {limits['head_size']['most']}"
        yield _refusal(
            "head_size", "head_size", str(request.head_size), allowed, limits["head_size"]
        )
    if request.num_heads % request.num_kv_heads:
        allowed = f"a multiple of the {request.num_kv_heads} key/value heads"
        yield _refusal(
            "num_heads", "num_heads", str(request.num_heads), allowed, limits["num_heads"]
        )
    if simulated:
        return
    if request.dtype_name not in limits["dtype"]["values"]:
        allowed = " or ".join(limits["dtype"]["values"])
        yield _refusal("dtype", "dtype", request.dtype_name, allowed, limits["dtype"])
    missing = missing_package()
    if missing is not None:
        yield _refusal("package", facts()["distribution"], missing, facts()["install"], facts())


def _refusal(rule: str, parameter: str, found: str, allowed: str, entry: Any) -> Refusal:
    return Refusal(f"fa3.{rule}", parameter, found, allowed, entry["source"])
