"""interleave_rope: rotary embedding of interleaved pairs with output in half order."""

from __future__ import annotations

import torch

from ...operator import NpuCall, Operator, Provider, TensorMeta, Tolerance
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.rotary import rotate_interleaved_to_half
from .._shared.vendor_call import call_like_record
from .arguments import InterleaveRopeArguments
from .rules import CONTRACT
from .samples import samples


def _outputs(args: InterleaveRopeArguments) -> tuple[TensorMeta, ...]:
    return (TensorMeta(args.x.shape, args.x.dtype),)


def _run_reference(args: InterleaveRopeArguments) -> torch.Tensor:
    x, cos, sin = (tensor.float() for tensor in (args.x, args.cos, args.sin))
    return rotate_interleaved_to_half(x, cos, sin).to(args.x.dtype)


def _torch_npu_call(args: InterleaveRopeArguments) -> NpuCall:
    return call_like_record("npu_interleave_rope", args)


interleave_rope = register(
    Operator(
        contract=CONTRACT,
        record=InterleaveRopeArguments,
        returns="Tensor",
        outputs=_outputs,
        providers={
            "reference": Provider("reference", _run_reference),
            "torch_npu": torch_npu_provider(_torch_npu_call),
            "aclnn": aclnn_provider("interleave_rope"),
        },
        npu_calls={"torch_npu": _torch_npu_call},
        tolerances={
            torch.float16: Tolerance(1e-3, 1e-3),
            torch.bfloat16: Tolerance(2**-7, 2**-7),
        },
        samples=samples,
    )
)
