"""kv_quant_sparse_flash_attention: sparse attention over a packed 8-bit latent cache."""

from __future__ import annotations

import torch

from ...operator import Operator, Provider, TensorMeta, Tolerance
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from . import providers
from .arguments import KvQuantSparseFlashAttentionArguments
from .cpu import run_cpu
from .reference import run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: KvQuantSparseFlashAttentionArguments) -> tuple[TensorMeta, ...]:
    *rows, size = args.query.shape
    return (TensorMeta((*rows, size - args.rope_head_dim), args.query.dtype),)


kv_quant_sparse_flash_attention = register(
    Operator(
        contract=CONTRACT,
        record=KvQuantSparseFlashAttentionArguments,
        returns="Tensor",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", run_cpu, providers.host_gap),
            "reference": Provider("reference", run_reference, providers.host_gap),
            "torch_npu": torch_npu_provider(providers.torch_npu_call),
            "aclnn": aclnn_provider("kv_quant_sparse_flash_attention"),
        },
        npu_calls={"torch_npu": providers.torch_npu_call},
        tolerances={
            torch.float16: Tolerance(0.005, 1e-4, 0.01),
            torch.bfloat16: Tolerance(2**-7, 1e-4, 0.01),
        },
        samples=samples,
    )
)
