"""reshape_and_cache: write keys and values into the paged KV cache, ATB form."""

from __future__ import annotations

from ...operator import NpuCall, Operator, Provider, TensorMeta
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.vendor_call import call_like_record
from ..scatter_pa_kv_cache.providers import run_cpu, run_reference
from .arguments import ReshapeAndCacheArguments
from .rules import CONTRACT
from .samples import samples


def _outputs(args: ReshapeAndCacheArguments) -> tuple[TensorMeta, ...]:
    return ()


def _torch_npu_call(args: ReshapeAndCacheArguments) -> NpuCall:
    return call_like_record("_npu_reshape_and_cache", args)


def _run_cpu(args: ReshapeAndCacheArguments) -> None:
    run_cpu(args.as_scatter())


def _run_reference(args: ReshapeAndCacheArguments) -> None:
    run_reference(args.as_scatter())


reshape_and_cache = register(
    Operator(
        contract=CONTRACT,
        record=ReshapeAndCacheArguments,
        returns="()",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", _run_cpu),
            "reference": Provider("reference", _run_reference),
            "torch_npu": torch_npu_provider(_torch_npu_call),
        },
        npu_calls={"torch_npu": _torch_npu_call},
        samples=samples,
    )
)
