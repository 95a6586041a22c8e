"""paged_attention: decode attention over paged caches (ATB)."""

from __future__ import annotations

import torch

from ...operator import NpuCall, Operator, Provider, TensorMeta, Tolerance
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.vendor_call import call_like_record
from .arguments import PagedAttentionArguments
from .reference import run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: PagedAttentionArguments) -> tuple[TensorMeta, ...]:
    return ()


def _torch_npu_call(args: PagedAttentionArguments) -> NpuCall:
    return call_like_record("_npu_paged_attention", args)


paged_attention = register(
    Operator(
        contract=CONTRACT,
        record=PagedAttentionArguments,
        returns="()",
        outputs=_outputs,
        providers={
            "reference": Provider("reference", run_reference),
            "torch_npu": torch_npu_provider(_torch_npu_call),
        },
        npu_calls={"torch_npu": _torch_npu_call},
        tolerances={
            torch.float16: Tolerance(1e-3, 1e-3),
            torch.bfloat16: Tolerance(2**-7, 2**-7),
        },
        samples=samples,
    )
)
