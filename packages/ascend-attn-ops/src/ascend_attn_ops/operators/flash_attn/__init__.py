"""flash_attn: attention with device lengths and a plan made beforehand."""

from __future__ import annotations

import torch

from ...operator import Operator, Provider, TensorMeta, Tolerance
from ...providers.aclnn import aclnn_provider
from ...providers.cann_ops_transformer import cann_ops_transformer_provider
from ...registry import register
from .._shared.flash_attn import size_of
from . import providers, values  # noqa: F401 - values registers the predicates of the value rules
from .arguments import FlashAttnArguments
from .cpu import run_cpu
from .reference import run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: FlashAttnArguments) -> tuple[TensorMeta, ...]:
    q, layout = args.q, args.layout_q
    sizes = {letter: size_of(q, layout, letter) for letter in layout}
    sizes["D"] = size_of(args.v, args.layout_kv, "D")
    out = tuple(sizes[letter] for letter in args.layout_out)
    lse: tuple[int, ...] = (0,)
    if args.return_softmax_lse:
        lse = tuple(sizes[letter] for letter in ("NT" if layout == "TND" else "BNS"))
    return TensorMeta(out, q.dtype), TensorMeta(lse, torch.float32)


flash_attn = register(
    Operator(
        contract=CONTRACT,
        record=FlashAttnArguments,
        returns="(Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", run_cpu),
            "reference": Provider("reference", run_reference),
            "cann_ops_transformer": cann_ops_transformer_provider(
                providers.cann_ops_transformer_call
            ),
            "aclnn": aclnn_provider("flash_attn"),
        },
        npu_calls={"cann_ops_transformer": providers.cann_ops_transformer_call},
        tolerances={
            torch.float16: Tolerance(0.005, 2.5e-5, 0.005),
            torch.bfloat16: Tolerance(2**-7, 1e-4, 0.005),
        },
        samples=samples,
    )
)
