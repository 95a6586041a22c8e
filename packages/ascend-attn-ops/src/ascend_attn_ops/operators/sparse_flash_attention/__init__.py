"""sparse_flash_attention: absorbed MLA attention over keys that an indexer selected."""

from __future__ import annotations

import torch

from ...operator import Operator, Provider, TensorMeta, Tolerance
from ...providers.aclnn import aclnn_provider
from ...registry import register
from . import providers
from .arguments import SparseFlashAttentionArguments
from .cpu import run_cpu
from .reference import run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: SparseFlashAttentionArguments) -> tuple[TensorMeta, ...]:
    *rows, heads, _ = args.query.shape
    kv_heads = args.key.shape[-2]
    group = heads // kv_heads
    statistics: tuple[int, ...] = (0,)
    if args.return_softmax_lse:
        statistics = (*rows[:-1], kv_heads, rows[-1], group)
    statistic = TensorMeta(statistics, torch.float32)
    return TensorMeta(tuple(args.query.shape), args.query.dtype), statistic, statistic


sparse_flash_attention = register(
    Operator(
        contract=CONTRACT,
        record=SparseFlashAttentionArguments,
        returns="(Tensor, Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", run_cpu),
            "reference": Provider("reference", run_reference),
            "torch_npu": providers.TORCH_NPU,
            "aclnn": aclnn_provider("sparse_flash_attention"),
        },
        npu_calls={"torch_npu": providers.torch_npu_call},
        tolerances={
            torch.float16: Tolerance(0.005, 2.5e-5, 0.005),
            torch.bfloat16: Tolerance(2**-7, 1e-4, 0.005),
        },
        samples=samples,
    )
)
