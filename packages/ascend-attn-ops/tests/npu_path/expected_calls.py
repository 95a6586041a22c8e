"""The aclnn call that a case must lead to: operator and every argument, from the contract's side.

Written from the vendor's documents of torch_npu and aclnn, not from what the emulator saw: which
operator version serves which product, which arguments have other names, and what torch_npu fills
in by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from npu_path.support import Arguments, Case

from ascend_attn_ops.aclnn_abi import Parameter, signature
from ascend_attn_ops.emulator import TensorArgument
from ascend_hwprofile import HardwareProfile

_INFER_V1 = {"scale_value": "scale"}
_INFER_V2 = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale_value": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
    "key_antiquant_mode": "key_quant_mode",
    "value_antiquant_mode": "value_quant_mode",
}
_LATENT = {"ckv_scale": "c_kv_scale", "ckv_offset": "c_kv_offset"}
# operator -> (aclnn operator, aclnn name -> name in the contract)
NAMES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "sparse_flash_attention": ("aclnnSparseFlashAttention", {}),
    "kv_quant_sparse_flash_attention": ("aclnnKvQuantSparseFlashAttention", {}),
    "lightning_indexer": ("aclnnLightningIndexer", {}),
    "quant_lightning_indexer": ("aclnnQuantLightningIndexer", {}),
    "fused_infer_attention_score": ("aclnnFusedInferAttentionScoreV3", _INFER_V1),
    "fused_infer_attention_score_v2": ("aclnnFusedInferAttentionScoreV4", _INFER_V2),
    "attention_update": ("aclnnAttentionUpdate", {}),
    "ring_attention_update": ("aclnnRingAttentionUpdateV2", {}),
    "scatter_pa_kv_cache": ("aclnnScatterPaKvCache", {}),
    "gather_pa_kv_cache": ("aclnnGatherPaKvCache", {}),
    "interleave_rope": ("aclnnInterleaveRope", {}),
    "rotary_position_embedding": (
        "aclnnRotaryPositionEmbeddingV2",
        {"x": "input", "cos": "r1", "sin": "r2"},
    ),
    "kv_rmsnorm_rope_cache": ("aclnnKvRmsNormRopeCache", _LATENT),
    "kv_rmsnorm_rope_cache_v2": ("aclnnKvRmsNormRopeCache", _LATENT),
    "mla_prolog_v2": ("aclnnMlaPrologV2WeightNz", {}),
    "mla_prolog_v3": ("aclnnMlaPrologV3WeightNz", {}),
    "paged_attention": ("atb::_npu_paged_attention", {}),
    "reshape_and_cache": ("atb::_npu_reshape_and_cache", {}),
}
# What torch_npu passes by itself, or what an aclnn operator has and the contract lacks.
FILLED_IN: Mapping[str, Mapping[str, Any]] = {
    "scatter_pa_kv_cache": {"scatter_mode": "None", "strides": [1, 1], "offsets": [0, 0]},
    "gather_pa_kv_cache": {"cache_mode": "Norm"},
    "fused_infer_attention_score": {
        "dequant_scale_query": None, "learnable_sink": None, "query_quant_mode": 0,
        "q_start_idx": None, "kv_start_idx": None, "pse_type": 0,
    },
    "fused_infer_attention_score_v2": {
        **dict.fromkeys(
            ("dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2",
             "antiquant_scale", "antiquant_offset", "query_padding_size", "kv_padding_size",
             "key_antiquant_scale", "key_antiquant_offset", "value_antiquant_scale",
             "value_antiquant_offset", "key_shared_prefix", "value_shared_prefix",
             "actual_shared_prefix_len", "key_rope_antiquant_scale", "q_start_idx",
             "kv_start_idx")
        ),
        "antiquant_mode": 0, "pse_type": 0,
    },
}  # fmt: skip
ON_A5 = {
    "aclnnFusedInferAttentionScoreV3": "aclnnFusedInferAttentionScoreV5",
    "aclnnFusedInferAttentionScoreV4": "aclnnFusedInferAttentionScoreV5",
}
# Outputs of the contract that are outputs of the aclnn operator, where that is not the last ones.
OUTPUTS: Mapping[str, tuple[int, ...]] = {"mla_prolog_v2": (0, 1, 4)}
# Calls that our provider makes in another form: every query row as a request of its own.
CHANGED: Mapping[tuple[str, str], Callable[[Arguments], Arguments]] = {
    ("sparse_flash_attention", "paged_with_statistics"): lambda a: {
        **a,
        "query": torch.empty(6, 1, 8, 512, dtype=torch.bfloat16),
        "query_rope": torch.empty(6, 1, 8, 64, dtype=torch.bfloat16),
        "sparse_indices": torch.empty(6, 1, 1, 20, dtype=torch.int32),
        "layout_query": "BSND",
        "actual_seq_lengths_query": None,
        "actual_seq_lengths_kv": torch.empty(6, dtype=torch.int32),
        "block_table": torch.empty(6, 3, dtype=torch.int32),
    }
}
_ROTARY_MODES = {"half": 0, "interleave": 1}
_NZ_WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")


def expected_operator(op: str, arguments: Arguments, profile: HardwareProfile) -> str:
    """The operator version that serves a call on a product."""
    operator, _ = NAMES[op]
    if arguments.get("sinks") is not None:
        operator += "V2"
    return ON_A5.get(operator, operator) if profile.family.value == "A5" else operator


def expected_call(case: Case, profile: HardwareProfile) -> tuple[str, dict[str, Any]]:
    """Operator name and described arguments, in the order of the signature."""
    arguments = case.arguments()
    operator, names = expected_operator(case.op, arguments, profile), NAMES[case.op][1]
    record = case.operator.bind(**CHANGED.get((case.op, case.name), dict)(arguments))
    if operator.startswith("atb::"):
        return operator, {name: described(value) for name, value in arguments.items()}
    metas = case.operator.outputs(record)
    picked = OUTPUTS.get(case.op, range(len(metas) - _output_count(operator), len(metas)))
    outputs = iter([metas[i] for i in picked])
    wanted = {}
    for parameter in signature(operator).parameters:
        if parameter.role == "output":
            wanted[parameter.name] = _output(case, parameter, next(outputs))
        else:
            wanted[parameter.name] = _input(case, parameter, names, record)
    return operator, wanted


def _output_count(operator: str) -> int:
    return sum(parameter.role == "output" for parameter in signature(operator).parameters)


def _input(case: Case, parameter: Parameter, names: Mapping[str, str], record: Any) -> Any:
    filled = FILLED_IN.get(case.op, {})
    if parameter.name in filled:
        return filled[parameter.name]
    if parameter.name == "mode":
        return _ROTARY_MODES[record.rotary_mode]
    value = getattr(record, names.get(parameter.name, parameter.name))
    if parameter.kind == "tensors" and isinstance(value, torch.Tensor):
        value = [value]
    text = described(value)
    nz = case.op.startswith("mla_prolog") and parameter.name in _NZ_WEIGHTS
    return f"{text} FRACTAL_NZ" if nz else text


def _output(case: Case, parameter: Parameter, meta: Any) -> Any:
    if parameter.optional and meta.shape == (0,):
        return None  # not asked for
    if case.op == "attention_update" and parameter.name == "lse_out":
        return None if case.arguments()["update_type"] == 0 else _plain(meta)
    return _plain(meta)


def _plain(meta: Any) -> str:
    return f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"


def described(value: Any) -> Any:
    """An argument as the call log shows it."""
    if isinstance(value, torch.Tensor):
        return str(TensorArgument.of(value))
    if isinstance(value, (list, tuple)):
        return [described(entry) for entry in value]
    return value
