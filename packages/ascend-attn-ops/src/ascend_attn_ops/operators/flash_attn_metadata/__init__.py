"""flash_attn_metadata: the work split of flash_attn."""

from __future__ import annotations

import torch

from ...operator import Operator, Provider, TensorMeta
from ...providers.aclnn import aclnn_provider
from ...providers.cann_ops_transformer import cann_ops_transformer_provider
from ...registry import register
from .._shared.flash_attn import current_cores
from . import providers
from .arguments import FlashAttnMetadataArguments
from .reference import metadata_words, run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: FlashAttnMetadataArguments) -> tuple[TensorMeta, ...]:
    words = metadata_words(args.requests, args.num_heads_kv, current_cores())
    return (TensorMeta((words,), torch.int32),)


flash_attn_metadata = register(
    Operator(
        contract=CONTRACT,
        record=FlashAttnMetadataArguments,
        returns="Tensor",
        outputs=_outputs,
        providers={
            "reference": Provider("reference", run_reference),
            "cann_ops_transformer": cann_ops_transformer_provider(
                providers.cann_ops_transformer_call
            ),
            "aclnn": aclnn_provider("flash_attn_metadata"),
        },
        npu_calls={"cann_ops_transformer": providers.cann_ops_transformer_call},
        samples=samples,
    )
)
