"""quant_lightning_indexer_v2: the cann_ops_transformer form, also over compressed keys."""

from __future__ import annotations

import attrs
import torch

from ...operator import Operator, Provider, TensorMeta
from ...providers.cann_ops_transformer import cann_ops_transformer_provider
from ...registry import register
from .._shared.indexer_outputs import indices_meta
from . import providers
from .arguments import QuantLightningIndexerV2Arguments
from .rules import CONTRACT
from .samples import samples


def _outputs(args: QuantLightningIndexerV2Arguments) -> tuple[TensorMeta, ...]:
    indices = indices_meta(args.q, args.k, args.topk)
    return indices, TensorMeta(indices.shape if args.return_value else (0,), torch.bfloat16)


quant_lightning_indexer_v2 = register(
    Operator(
        contract=CONTRACT,
        record=QuantLightningIndexerV2Arguments,
        returns="(Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "cpu": Provider("cpu", providers.run_cpu, providers.host_gap),
            "reference": Provider("reference", providers.run_reference, providers.host_gap),
            "cann_ops_transformer": attrs.evolve(
                cann_ops_transformer_provider(providers.cann_ops_transformer_call),
                gap=providers.npu_gap,
            ),
        },
        npu_calls={"cann_ops_transformer": providers.cann_ops_transformer_call},
        samples=samples,
    )
)
