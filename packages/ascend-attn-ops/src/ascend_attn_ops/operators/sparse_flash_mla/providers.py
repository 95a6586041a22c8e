"""The vendor call as data."""

from __future__ import annotations

from ...arguments import parameters
from ...operator import NpuCall
from .arguments import SparseFlashMlaArguments as Args


def cann_ops_transformer_call(a: Args) -> NpuCall:
    """q by position, everything else by name; numbers, masks, windows and layouts always.

    Builds of the vendor's package differ in their defaults, so none is relied on.
    """
    kwargs = {
        p.name: value
        for p in parameters(Args)
        if p.keyword_only and (value := getattr(a, p.name)) is not None
    }
    return NpuCall("sparse_flash_mla", (a.q,), kwargs)
