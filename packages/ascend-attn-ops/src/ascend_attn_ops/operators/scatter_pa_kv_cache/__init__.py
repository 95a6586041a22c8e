"""scatter_pa_kv_cache: write keys and values into the paged KV cache."""

from __future__ import annotations

from ...operator import Operator, Provider, TensorMeta
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from . import providers
from .arguments import ScatterPaKvCacheArguments
from .rules import CONTRACT
from .samples import samples


def _outputs(args: ScatterPaKvCacheArguments) -> tuple[TensorMeta, ...]:
    return ()


scatter_pa_kv_cache = register(
    Operator(
        contract=CONTRACT,
        record=ScatterPaKvCacheArguments,
        returns="()",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", providers.run_cpu, providers.gap, prepare=providers.prepare_cpu),
            "reference": Provider("reference", providers.run_reference, providers.gap),
            "torch_npu": torch_npu_provider(providers.torch_npu_call),
            "aclnn": aclnn_provider("scatter_pa_kv_cache"),
        },
        npu_calls={"torch_npu": providers.torch_npu_call},
        samples=samples,
    )
)
