"""The vendor call as data."""

from __future__ import annotations

from ...arguments import parameters
from ...operator import NpuCall
from .arguments import SparseFlashAttentionArguments as Args


def torch_npu_call(a: Args) -> NpuCall:
    """Five positional arguments; by name what is given, and always attention_mode.

    The schema's default attention_mode 0 is illegal, so that it must never be left out. ``sinks``
    is only passed when given: with it torch_npu calls aclnnSparseFlashAttentionV2. A missing value
    becomes the key, because the documents require one.
    """
    kwargs = {
        p.name: value
        for p in parameters(Args)
        if p.keyword_only
        and (value := getattr(a, p.name)) is not None
        and (p.kind == "tensor" or p.name == "attention_mode" or value != p.default)
    }
    value = a.key if a.value is None else a.value
    positional = (a.query, a.key, value, a.sparse_indices, a.scale_value)
    return NpuCall("npu_sparse_flash_attention", positional, kwargs)
