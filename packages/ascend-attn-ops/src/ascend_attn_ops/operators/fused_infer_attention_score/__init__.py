"""fused_infer_attention_score (v1): inference attention over whole or paged keys."""

from __future__ import annotations

import torch

from ...operator import Operator, Provider, TensorMeta, Tolerance
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from . import providers
from .arguments import FusedInferAttentionScoreArguments
from .cpu import run_cpu
from .reference import run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: FusedInferAttentionScoreArguments) -> tuple[TensorMeta, ...]:
    tokens, heads, _ = args.query.shape
    out = TensorMeta((tokens, heads, args.query.shape[2]), args.query.dtype)
    lse = (tokens, heads, 1) if args.softmax_lse_flag else (0,)
    return out, TensorMeta(lse, torch.float32)


fused_infer_attention_score = register(
    Operator(
        contract=CONTRACT,
        record=FusedInferAttentionScoreArguments,
        returns="(Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", run_cpu, providers.host_gap),
            "reference": Provider("reference", run_reference, providers.host_gap),
            "torch_npu": torch_npu_provider(providers.torch_npu_call),
        },
        npu_calls={"torch_npu": providers.torch_npu_call},
        tolerances={
            torch.float16: Tolerance(0.005, 2.5e-5, 0.005),
            torch.bfloat16: Tolerance(2**-7, 1e-4, 0.005),
        },
        samples=samples,
    )
)
