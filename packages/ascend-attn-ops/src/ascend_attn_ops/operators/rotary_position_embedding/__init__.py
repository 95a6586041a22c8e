"""rotary_position_embedding: rotary embedding of half or interleaved pairs."""

from __future__ import annotations

import torch

from ...operator import NpuCall, Operator, Provider, TensorMeta, Tolerance
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.rotary import rotate_half, rotate_interleaved
from .._shared.vendor_call import call_like_record
from .arguments import RotaryPositionEmbeddingArguments
from .rules import CONTRACT
from .samples import samples


def _outputs(args: RotaryPositionEmbeddingArguments) -> tuple[TensorMeta, ...]:
    return (TensorMeta(args.input.shape, args.input.dtype),)


def _run_reference(args: RotaryPositionEmbeddingArguments) -> torch.Tensor:
    x, cos, sin = (tensor.float() for tensor in (args.input, args.r1, args.r2))
    if args.rotate is not None:
        rotated = x * cos + x @ args.rotate.float() * sin
    elif args.rotary_mode == "half":
        rotated = rotate_half(x, cos, sin)
    else:
        rotated = rotate_interleaved(x, cos, sin)
    return rotated.to(args.input.dtype)


def _torch_npu_call(args: RotaryPositionEmbeddingArguments) -> NpuCall:
    """npu_rotary_mul; the mode is always named, because the results of the modes differ."""
    call = call_like_record("npu_rotary_mul", args)
    return NpuCall(call.function, call.args, {"rotary_mode": args.rotary_mode, **call.kwargs})


rotary_position_embedding = register(
    Operator(
        contract=CONTRACT,
        record=RotaryPositionEmbeddingArguments,
        returns="Tensor",
        outputs=_outputs,
        providers={
            "reference": Provider("reference", _run_reference),
            "torch_npu": torch_npu_provider(_torch_npu_call),
            "aclnn": aclnn_provider("rotary_position_embedding"),
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
