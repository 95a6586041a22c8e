"""kv_rmsnorm_rope_cache_v2: version 1 with mutable caches that are not returned."""

from __future__ import annotations

from ...operator import NpuCall, Operator, Provider
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.vendor_call import call_like_record
from ..kv_rmsnorm_rope_cache import TOLERANCES, embedded_outputs
from ..kv_rmsnorm_rope_cache.reference import host_gap, update_caches
from ..kv_rmsnorm_rope_cache.rules import CONTRACT
from ..kv_rmsnorm_rope_cache.samples import samples
from .arguments import KvRmsnormRopeCacheV2Arguments


def _host_gap(args: KvRmsnormRopeCacheV2Arguments) -> str | None:
    if args.k_cache_dtype is not None or args.ckv_cache_dtype is not None:
        return "k_cache_dtype, ckv_cache_dtype: caches of a dtype that torch lacks"
    return host_gap(args)


def _torch_npu_call(args: KvRmsnormRopeCacheV2Arguments) -> NpuCall:
    return call_like_record("npu_kv_rmsnorm_rope_cache_v2", args)


kv_rmsnorm_rope_cache_v2 = register(
    Operator(
        contract=CONTRACT.extended(__name__),
        record=KvRmsnormRopeCacheV2Arguments,
        returns="(Tensor, Tensor)",
        outputs=embedded_outputs,
        providers={
            "reference": Provider("reference", update_caches, _host_gap),
            "torch_npu": torch_npu_provider(_torch_npu_call),
            "aclnn": aclnn_provider("kv_rmsnorm_rope_cache_v2"),
        },
        npu_calls={"torch_npu": _torch_npu_call},
        tolerances=TOLERANCES,
        samples=samples,
    )
)
