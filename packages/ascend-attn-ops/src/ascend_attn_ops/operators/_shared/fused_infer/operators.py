"""The operator record of one version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ....contract import Contract
from ....operator import NpuCall, Operator, Provider, Sample, TensorMeta, Tolerance
from ....providers.aclnn import aclnn_provider
from ....providers.torch_npu import torch_npu_provider
from .call import Call
from .cpu import prepare_cpu, run_cpu
from .outputs import output_metas
from .problem import host_gap
from .reference import run_reference

Outputs = tuple[torch.Tensor, torch.Tensor]


def fused_infer_operator(
    contract: Contract[Any],
    record: type[Any],
    torch_npu_call: Callable[[Any], NpuCall],
    samples: Callable[[], Iterator[Sample]],
) -> Operator[Any]:
    """Operator with the host providers that both versions share."""
    return Operator(
        contract=contract,
        record=record,
        returns="(Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", _on_host(run_cpu), _gap, prepare=_prepare),
            "reference": Provider("reference", _on_host(run_reference), _gap),
            "torch_npu": torch_npu_provider(torch_npu_call),
            "aclnn": aclnn_provider(contract.name),
        },
        npu_calls={"torch_npu": torch_npu_call},
        tolerances={
            torch.float16: Tolerance(0.005, 2.5e-5, 0.005),
            torch.bfloat16: Tolerance(2**-7, 1e-4, 0.005),
        },
        samples=samples,
    )


def _outputs(args: Any) -> tuple[TensorMeta, ...]:
    return output_metas(args.call)


def _gap(args: Any) -> str | None:
    return host_gap(args.call)


def _prepare(args: Any) -> Callable[..., Any] | None:
    return None if args.out else prepare_cpu(args.call)


def _on_host(run: Callable[[Call], Outputs]) -> Callable[[Any], Any]:
    def execute(args: Any) -> Any:
        computed = run(args.call)
        if not args.out:
            return computed
        for given, result in zip(args.out, computed, strict=False):
            if given.shape == result.shape:  # an lse that was not asked for stays untouched
                given.copy_(result)
        return tuple(args.out)

    return execute
