"""kv_rmsnorm_rope_cache: norm, rotary embedding and cache write of the latent KV of MLA."""

from __future__ import annotations

import torch

from ...operator import NpuCall, Operator, Provider, TensorMeta, Tolerance
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.vendor_call import call_like_record
from .arguments import KvRmsnormRopeCacheArguments
from .reference import host_gap, run_reference
from .rules import CONTRACT
from .samples import samples

TOLERANCES = {
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(2**-7, 2**-7),
}


def embedded_outputs(args: KvRmsnormRopeCacheArguments) -> tuple[TensorMeta, TensorMeta]:
    """k_embed_out and y_out, in the sizes of the vendor's meta kernel."""
    sizes = args.cos.shape[3], args.gamma.shape[0]
    if args.v is not None:
        sizes = args.kv.shape[3], args.v.shape[3]
    rows = tuple(args.kv.shape[:3])
    return TensorMeta((*rows, sizes[0]), args.kv.dtype), TensorMeta(
        (*rows, sizes[1]), args.kv.dtype
    )


def _outputs(args: KvRmsnormRopeCacheArguments) -> tuple[TensorMeta, ...]:
    caches = (TensorMeta(cache.shape, cache.dtype) for cache in (args.k_cache, args.ckv_cache))
    return (*caches, *embedded_outputs(args))


def _torch_npu_call(args: KvRmsnormRopeCacheArguments) -> NpuCall:
    return call_like_record("npu_kv_rmsnorm_rope_cache", args)


kv_rmsnorm_rope_cache = register(
    Operator(
        contract=CONTRACT,
        record=KvRmsnormRopeCacheArguments,
        returns="(Tensor, Tensor, Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "reference": Provider("reference", run_reference, host_gap),
            "torch_npu": torch_npu_provider(_torch_npu_call),
            "aclnn": aclnn_provider("kv_rmsnorm_rope_cache"),
        },
        npu_calls={"torch_npu": _torch_npu_call},
        tolerances=TOLERANCES,
        samples=samples,
    )
)
