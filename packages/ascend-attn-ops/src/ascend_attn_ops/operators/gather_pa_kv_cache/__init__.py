"""gather_pa_kv_cache: read keys and values out of the paged KV cache."""

from __future__ import annotations

from ...operator import Operator, Provider, TensorMeta
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from . import providers
from .arguments import GatherPaKvCacheArguments
from .cpu import run_cpu
from .reference import run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: GatherPaKvCacheArguments) -> tuple[TensorMeta, ...]:
    return ()


gather_pa_kv_cache = register(
    Operator(
        contract=CONTRACT,
        record=GatherPaKvCacheArguments,
        returns="()",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", run_cpu, providers.host_gap),
            "reference": Provider("reference", run_reference, providers.host_gap),
            "torch_npu": torch_npu_provider(providers.torch_npu_call),
            "aclnn": aclnn_provider("gather_pa_kv_cache"),
        },
        npu_calls={"torch_npu": providers.torch_npu_call},
        samples=samples,
    )
)
