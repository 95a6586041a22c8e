"""sparse_flash_mla: attention over original and compressed keys with one softmax."""

from __future__ import annotations

import torch

from ...operator import Operator, Provider, TensorMeta, Tolerance
from ...providers.cann_ops_transformer import cann_ops_transformer_provider
from ...registry import register
from . import providers, values  # noqa: F401 - values gives the value rules their predicates
from .arguments import SparseFlashMlaArguments
from .reference import run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: SparseFlashMlaArguments) -> tuple[TensorMeta, ...]:
    statistic: tuple[int, ...] = ()
    if args.return_softmax_lse:
        *batch, tokens, heads, _ = args.q.shape
        statistic = (*batch, 1, tokens, heads)
    return (
        TensorMeta(tuple(args.q.shape), args.q.dtype),
        TensorMeta(statistic, torch.float32),
    )


sparse_flash_mla = register(
    Operator(
        contract=CONTRACT,
        record=SparseFlashMlaArguments,
        returns="(Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "reference": Provider("reference", run_reference),
            "cann_ops_transformer": cann_ops_transformer_provider(
                providers.cann_ops_transformer_call
            ),
        },
        npu_calls={"cann_ops_transformer": providers.cann_ops_transformer_call},
        tolerances={
            torch.float16: Tolerance(0.005, 2.5e-5, 0.005),
            torch.bfloat16: Tolerance(2**-7, 1e-4, 0.005),
        },
        samples=samples,
    )
)
