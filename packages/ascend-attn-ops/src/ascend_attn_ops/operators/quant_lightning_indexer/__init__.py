"""quant_lightning_indexer: the best keys of each query row from quantised query and key."""

from __future__ import annotations

from ...operator import Operator, Provider, TensorMeta
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.indexer_outputs import indices_meta
from . import providers
from .arguments import QuantLightningIndexerArguments
from .rules import CONTRACT
from .samples import samples


def _outputs(args: QuantLightningIndexerArguments) -> tuple[TensorMeta, ...]:
    return (indices_meta(args.query, args.key, args.sparse_count),)


quant_lightning_indexer = register(
    Operator(
        contract=CONTRACT,
        record=QuantLightningIndexerArguments,
        returns="Tensor",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", providers.run_cpu, providers.host_gap),
            "reference": Provider("reference", providers.run_reference, providers.host_gap),
            "torch_npu": torch_npu_provider(providers.torch_npu_call),
            "aclnn": aclnn_provider("quant_lightning_indexer"),
        },
        npu_calls={"torch_npu": providers.torch_npu_call},
        samples=samples,
    )
)
