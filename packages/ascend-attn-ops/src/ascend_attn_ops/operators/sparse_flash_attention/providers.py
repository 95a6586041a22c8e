"""The vendor call as data."""

from __future__ import annotations

from typing import Any

from ...arguments import parameters
from ...operator import NpuCall, Provider
from ...providers.torch_npu import torch_npu_provider
from . import paged_statistics
from .arguments import SparseFlashAttentionArguments as Args


def torch_npu_call(a: Args) -> NpuCall:
    """Five positional arguments; by name what is given, and always attention_mode.

    The schema's default attention_mode 0 is illegal, so that it must never be left out. ``sinks``
    is only passed when given: with it torch_npu calls aclnnSparseFlashAttentionV2. A missing value
    becomes the key, because the documents require one. Statistics over paged keys are asked for in
    another form, see :mod:`.paged_statistics`.
    """
    if paged_statistics.needed(a):
        a = paged_statistics.rows_as_requests(a)
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


_VENDOR = torch_npu_provider(torch_npu_call)


def run_torch_npu(a: Args) -> Any:
    """The vendor call, its outputs in the layout that was asked for."""
    outputs = _VENDOR.run(a)
    return paged_statistics.as_packed(outputs) if paged_statistics.needed(a) else outputs


TORCH_NPU = Provider("torch_npu", run_torch_npu, host=False)
