"""The vendor call as data."""

from __future__ import annotations

from ...arguments import parameters
from ...operator import NpuCall
from .arguments import SparseFlashMlaMetadataArguments as Args


def cann_ops_transformer_call(a: Args) -> NpuCall:
    """Three positional arguments; every number, mask, window and layout by name.

    Builds of the vendor's package differ in their defaults, so none is relied on.
    """
    kwargs = {
        p.name: value
        for p in parameters(Args)
        if p.keyword_only and (value := getattr(a, p.name)) is not None
    }
    positional = (a.num_heads_q, a.num_heads_kv, a.head_dim)
    return NpuCall("sparse_flash_mla_metadata", positional, kwargs)
