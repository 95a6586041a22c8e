"""mla_prolog_v2: projections, norms, rotary embedding and cache writes of MLA, version 2."""

from __future__ import annotations

import torch

from ...operator import NpuCall, Operator, Provider, TensorMeta
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.vendor_call import call_like_record
from ..mla_prolog_v3 import TOLERANCES, query_outputs
from .arguments import MlaPrologV2Arguments
from .reference import run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: MlaPrologV2Arguments) -> tuple[TensorMeta, ...]:
    call = args.as_v3()
    scale = (call.tokens, args.weight_uk.shape[0], 1) if call.query_quant_mode else (1,)
    caches = (TensorMeta(cache.shape, cache.dtype) for cache in (args.kv_cache, args.kr_cache))
    return (*query_outputs(call), *caches, TensorMeta(scale, torch.float32))


def _torch_npu_call(args: MlaPrologV2Arguments) -> NpuCall:
    return call_like_record("npu_mla_prolog_v2", args)


mla_prolog_v2 = register(
    Operator(
        contract=CONTRACT,
        record=MlaPrologV2Arguments,
        returns="(Tensor, Tensor, Tensor, Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "reference": Provider("reference", run_reference),
            "torch_npu": torch_npu_provider(_torch_npu_call),
            "aclnn": aclnn_provider("mla_prolog_v2"),
        },
        npu_calls={"torch_npu": _torch_npu_call},
        tolerances=TOLERANCES,
        samples=samples,
    )
)
