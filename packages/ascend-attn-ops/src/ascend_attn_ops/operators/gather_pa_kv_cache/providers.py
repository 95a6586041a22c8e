"""Which arguments the providers take, and the vendor call as data."""

from __future__ import annotations

from ...operator import NpuCall
from .._shared.vendor_call import call_like_record
from .arguments import GatherPaKvCacheArguments as Args


def host_gap(a: Args) -> str | None:
    """NZ caches, which nothing but their shape would tell from plain ones."""
    if a.is_nd:
        return None
    return (
        f"caches {list(a.key_cache.shape)} and {list(a.value_cache.shape)} in NZ order: a host "
        "tensor does not carry its format, so that only (num_blocks, block_size, N, D) is taken"
    )


def torch_npu_call(a: Args) -> NpuCall:
    """``npu_gather_pa_kv_cache``, which fills key and value in place."""
    return call_like_record("npu_gather_pa_kv_cache", a)
