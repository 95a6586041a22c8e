"""attention_update: merge partial attention by log-sum-exp."""

from __future__ import annotations

import torch

from ...operator import NpuCall, Operator, Provider, TensorMeta, Tolerance
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.vendor_call import call_like_record
from .arguments import AttentionUpdateArguments
from .cpu import run_cpu
from .reference import run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: AttentionUpdateArguments) -> tuple[TensorMeta, ...]:
    out, lse = args.local_out[0], args.lse[0]
    return TensorMeta(out.shape, out.dtype), TensorMeta(lse.shape, torch.float32)


def _torch_npu_call(args: AttentionUpdateArguments) -> NpuCall:
    return call_like_record("npu_attention_update", args)


attention_update = register(
    Operator(
        contract=CONTRACT,
        record=AttentionUpdateArguments,
        returns="(Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", run_cpu),
            "reference": Provider("reference", run_reference),
            "torch_npu": torch_npu_provider(_torch_npu_call),
            "aclnn": aclnn_provider("attention_update"),
        },
        npu_calls={"torch_npu": _torch_npu_call},
        tolerances={
            torch.float32: Tolerance(1e-4, 1e-4),
            torch.float16: Tolerance(1e-3, 1e-3),
            torch.bfloat16: Tolerance(2**-7, 2**-7),
        },
        samples=samples,
    )
)
