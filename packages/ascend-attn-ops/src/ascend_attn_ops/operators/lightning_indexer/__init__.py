"""lightning_indexer: the best keys of each query row, for sparse attention."""

from __future__ import annotations

from ...operator import Operator, Provider, TensorMeta
from ...providers.aclnn import aclnn_provider
from ...providers.torch_npu import torch_npu_provider
from ...registry import register
from .._shared.indexer_outputs import indices_meta
from . import providers
from .arguments import LightningIndexerArguments
from .cpu import run_cpu
from .reference import run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: LightningIndexerArguments) -> tuple[TensorMeta, ...]:
    indices = indices_meta(args.query, args.key, args.sparse_count)
    shape = indices.shape if args.return_value else (0,)
    return indices, TensorMeta(shape, args.query.dtype)


lightning_indexer = register(
    Operator(
        contract=CONTRACT,
        record=LightningIndexerArguments,
        returns="(Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", run_cpu),
            "reference": Provider("reference", run_reference),
            "torch_npu": torch_npu_provider(providers.torch_npu_call),
            "aclnn": aclnn_provider("lightning_indexer"),
        },
        npu_calls={"torch_npu": providers.torch_npu_call},
        samples=samples,
    )
)
