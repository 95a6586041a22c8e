"""ring_attention_update: merge two attention results by softmax maximum and sum."""

from __future__ import annotations

import torch

from ...operator import NpuCall, Operator, Provider, TensorMeta, Tolerance
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.vendor_call import call_like_record
from .arguments import RingAttentionUpdateArguments
from .reference import host_gap, run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: RingAttentionUpdateArguments) -> tuple[TensorMeta, ...]:
    softmax = TensorMeta(args.prev_softmax_max.shape, torch.float32)
    return TensorMeta(args.prev_attn_out.shape, args.prev_attn_out.dtype), softmax, softmax


def _torch_npu_call(args: RingAttentionUpdateArguments) -> NpuCall:
    return call_like_record("npu_ring_attention_update", args)


ring_attention_update = register(
    Operator(
        contract=CONTRACT,
        record=RingAttentionUpdateArguments,
        returns="(Tensor, Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "reference": Provider("reference", run_reference, host_gap),
            "torch_npu": torch_npu_provider(_torch_npu_call),
            "aclnn": aclnn_provider("ring_attention_update"),
        },
        npu_calls={"torch_npu": _torch_npu_call},
        tolerances={
            dtype: Tolerance(0.005, 0.005)
            for dtype in (torch.float16, torch.bfloat16, torch.float32)
        },
        samples=samples,
    )
)
