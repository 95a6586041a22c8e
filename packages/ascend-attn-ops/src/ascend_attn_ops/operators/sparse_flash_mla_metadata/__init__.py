"""sparse_flash_mla_metadata: the work split of sparse_flash_mla."""

from __future__ import annotations

import torch

from ...operator import Operator, Provider, TensorMeta
from ...providers.cann_ops_transformer import cann_ops_transformer_provider
from ...registry import register
from . import providers
from .arguments import SparseFlashMlaMetadataArguments
from .reference import run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: SparseFlashMlaMetadataArguments) -> tuple[TensorMeta, ...]:
    return (TensorMeta((CONTRACT.limits["words"],), torch.int32),)


sparse_flash_mla_metadata = register(
    Operator(
        contract=CONTRACT,
        record=SparseFlashMlaMetadataArguments,
        returns="Tensor",
        outputs=_outputs,
        providers={
            "reference": Provider("reference", run_reference),
            "cann_ops_transformer": cann_ops_transformer_provider(
                providers.cann_ops_transformer_call
            ),
        },
        npu_calls={"cann_ops_transformer": providers.cann_ops_transformer_call},
        samples=samples,
    )
)
