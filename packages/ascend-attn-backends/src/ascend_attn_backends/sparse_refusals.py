"""Refusals that the sparse backends share: capability, cache dtype, limits of the operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ascend_attn_ops
from ascend_attn_ops import Refusal
from ascend_hwprofile import Capability, HardwareProfile

from .request import BackendRequest


def operator_refusals(
    backend: str,
    capability: Capability,
    request: BackendRequest,
    profile: HardwareProfile,
    calls: Mapping[str, Mapping[str, Any]],
) -> list[Refusal]:
    """Why a product does not run these operator calls.

    Args:
        backend: Name of the backend, for the rule.
        capability: What the product must be able to do; without it nothing else is asked.
        request: The layer.
        profile: The product.
        calls: Arguments of each operator, as data.
    """
    why_not = profile.why_not(capability)
    if why_not is not None:
        return [
            Refusal(
                rule=f"{backend}.capability",
                parameter="profile",
                found=f"{profile.soc_name}: {why_not}",
                allowed=f"a product with {capability.name}",
                source="ascend_hwprofile",
            )
        ]
    return [
        refusal
        for op, arguments in calls.items()
        for refusal in ascend_attn_ops.check(op, arguments, profile, provider=request.provider)
    ]


def plain_cache_refusals(backend: str, request: BackendRequest) -> list[Refusal]:
    """A refusal when the cache is to hold another dtype than the layer's own."""
    if request.kv_cache_dtype in ("auto", request.dtype_name):
        return []
    return [
        Refusal(
            rule=f"{backend}.kv_cache_dtype",
            parameter="kv_cache_dtype",
            found=request.kv_cache_dtype,
            allowed=f"auto or {request.dtype_name}, the dtype of the layer",
            source=f"{backend} backend: rows are stored as they are computed",
        )
    ]


def tensor(request: BackendRequest, *shape: int) -> dict[str, Any]:
    """A tensor of the layer's dtype, as data."""
    return {"shape": list(shape), "dtype": request.dtype_name}
