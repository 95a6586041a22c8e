"""compressor: compressed keys of DeepSeek V4 from hidden states, with the state of decoding."""

from __future__ import annotations

import torch

from ...operator import NpuCall, Operator, Provider, TensorMeta, Tolerance
from ...providers.cann_ops_transformer import cann_ops_transformer_provider
from ...registry import register
from .arguments import CompressorArguments
from .reference import output_shape, run_reference
from .rules import CONTRACT
from .samples import samples


def _outputs(args: CompressorArguments) -> tuple[TensorMeta, ...]:
    training = TensorMeta((0,), torch.float32)
    return (TensorMeta(output_shape(args), args.x.dtype), *([training] * 4))


def _cann_ops_transformer_call(a: CompressorArguments) -> NpuCall:
    """The nine tensors by position, the rest by name: rotary_mode's default is not usable."""
    positional = (
        a.x, a.wkv, a.wgate, a.kv_state, a.score_state, a.ape, a.norm_weight, a.rope_sin,
        a.rope_cos,
    )  # fmt: skip
    names = (
        "kv_block_table", "score_block_table", "cu_seqlens", "seqused", "start_pos",
        "rope_head_dim", "cmp_ratio", "coff", "norm_eps", "rotary_mode", "enabled_grad",
    )  # fmt: skip
    kwargs = {name: value for name in names if (value := getattr(a, name)) is not None}
    return NpuCall("compressor", positional, kwargs)


compressor = register(
    Operator(
        contract=CONTRACT,
        record=CompressorArguments,
        returns="(Tensor, Tensor, Tensor, Tensor, Tensor)",
        outputs=_outputs,
        providers={
            "reference": Provider("reference", run_reference),
            "cann_ops_transformer": cann_ops_transformer_provider(_cann_ops_transformer_call),
        },
        npu_calls={"cann_ops_transformer": _cann_ops_transformer_call},
        tolerances={
            torch.float16: Tolerance(0.005, 2.5e-5, 0.005),
            torch.bfloat16: Tolerance(2**-7, 1e-4, 0.005),
        },
        samples=samples,
    )
)
