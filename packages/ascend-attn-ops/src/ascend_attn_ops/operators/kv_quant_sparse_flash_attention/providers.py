"""Which arguments the host takes, and the vendor call as data."""

from __future__ import annotations

from ...operator import NpuCall
from .._shared.vendor_call import call_like_record
from .arguments import KvQuantSparseFlashAttentionArguments as Args


def host_gap(a: Args) -> str | None:
    """The bytes of hifloat8 are not decoded."""
    if a.key_dtype is None and a.key.dtype.is_signed:
        return None
    return "hifloat8 rows are not decoded on the host"


def torch_npu_call(a: Args) -> NpuCall:
    """Seven positional arguments, what differs from its default by name.

    attention_mode is always named because it can only be 2 and its default is 0.
    """
    return call_like_record("npu_kv_quant_sparse_flash_attention", a)
