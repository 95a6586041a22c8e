"""mla_prolog_v3: projections, norms, rotary embedding and cache writes of MLA."""

from __future__ import annotations

import torch

from ...operator import NpuCall, Operator, Provider, TensorMeta, Tolerance
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.vendor_call import call_like_record
from .arguments import MlaPrologV3Arguments
from .reference import host_gap, run_reference
from .rules import CONTRACT
from .samples import samples

TOLERANCES = {torch.bfloat16: Tolerance(0.005, 0.005), torch.int8: Tolerance(0.0, 1.0)}


def query_outputs(args: MlaPrologV3Arguments) -> tuple[TensorMeta, TensorMeta]:
    """query and query_rope."""
    heads, _, latent = args.weight_uk.shape
    float_dtype = args.rope_sin.dtype
    eight_bit = torch.float8_e4m3fn if args.weight_quant_mode == 3 else args.token_x.dtype
    dtype = eight_bit if args.query_quant_mode else float_dtype
    rope = TensorMeta((*args.lead, heads, args.rope_sin.shape[-1]), float_dtype)
    return TensorMeta((*args.lead, heads, latent), dtype), rope


def _outputs(args: MlaPrologV3Arguments) -> tuple[TensorMeta, ...]:
    scale: tuple[int, ...] = (0,)
    if args.query_quant_mode:
        scale = (args.tokens, args.weight_uk.shape[0], 1)
    norm: tuple[int, ...] = (0,)
    norm_scale: tuple[int, ...] = (0,)
    grouped = args.weight_quant_mode == 3
    if args.query_norm_flag:
        norm = (*args.lead, args.weight_dq.shape[1])
        groups = args.weight_dq.shape[1] // 32 if grouped else 1
        norm_scale = (args.tokens, groups) if args.weight_quant_mode else (0,)
    return (
        *query_outputs(args),
        TensorMeta(scale, torch.float32),
        TensorMeta(norm, args.weight_uq_qr.dtype),
        TensorMeta(norm_scale, torch.float8_e8m0fnu if grouped else torch.float32),
    )


def _torch_npu_call(args: MlaPrologV3Arguments) -> NpuCall:
    return call_like_record("npu_mla_prolog_v3", args)


mla_prolog_v3 = register(
    Operator(
        contract=CONTRACT,
        record=MlaPrologV3Arguments,
        returns="(Tensor, Tensor, Tensor, Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "reference": Provider("reference", run_reference, host_gap),
            "torch_npu": torch_npu_provider(_torch_npu_call),
            "aclnn": aclnn_provider("mla_prolog_v3"),
        },
        npu_calls={"torch_npu": _torch_npu_call},
        tolerances=TOLERANCES,
        samples=samples,
    )
)
