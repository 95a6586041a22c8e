"""fused_infer_attention_score: every request made dense, then float64 attention under a mask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..abi import NOT_EMULATED, AclnnError
from ..contracts import contract_check
from ..dispatch import kernel
from ._fused_infer_parts import Part, no_unknown_quantisation, parts, place_outputs

_TREE = 9
_V2_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale_value": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
    "key_antiquant_scale": "dequant_scale_key",
    "key_antiquant_offset": "dequant_offset_key",
    "value_antiquant_scale": "dequant_scale_value",
    "value_antiquant_offset": "dequant_offset_value",
    "key_rope_antiquant_scale": "dequant_scale_key_rope",
    "key_antiquant_mode": "key_quant_mode",
    "value_antiquant_mode": "value_quant_mode",
    "quant_scale2": "quant_scale_out",
    "quant_offset2": "quant_offset_out",
    "quant_scale1": "quant_scale_p",
}


def _keys(a: Any) -> Mapping[str, Any]:
    """A list of one tensor is the tensor: torch_npu always passes lists."""
    lists = {name: getattr(a, name) for name in ("key", "value")}
    return {name: x[0] if len(x) == 1 else tuple(x) for name, x in lists.items()}


def _v1_names(a: Any) -> Mapping[str, Any]:
    return {**vars(a), **_keys(a), "scale": a.scale_value}


def _v2_names(a: Any) -> Mapping[str, Any]:
    return {_V2_NAMES.get(name, name): value for name, value in {**vars(a), **_keys(a)}.items()}


_CHECK_V1 = contract_check("fused_infer_attention_score", _v1_names)
_CHECK_V2 = contract_check("fused_infer_attention_score_v2", _v2_names)


def _check_newest(name: str, a: Any) -> None:
    """torch_npu's versions 1 and 2 both call it; only 2 has sinks, query scales and tree masks."""
    given = a.learnable_sink is not None or a.dequant_scale_query is not None
    of_v2 = given or a.sparse_mode == _TREE
    (_CHECK_V2 if of_v2 else _CHECK_V1)(name, a)


@kernel("aclnnFusedInferAttentionScoreV3", check=_CHECK_V1, workspace=8192)
def version_3(a: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What npu_fused_infer_attention_score calls on A2 and A3."""
    return _attend_all(a, None)


@kernel("aclnnFusedInferAttentionScoreV4", check=_CHECK_V2, workspace=8192)
def version_4(a: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What npu_fused_infer_attention_score_v2 calls on A2 and A3."""
    return _attend_all(a, a.learnable_sink)


@kernel("aclnnFusedInferAttentionScoreV5", check=_check_newest, workspace=8192)
def version_5(a: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What both call on Ascend950."""
    return _attend_all(a, a.learnable_sink)


def _attend_all(a: Any, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    no_unknown_quantisation(a)
    if a.sparse_mode > 4:
        raise AclnnError(NOT_EMULATED, f"sparse_mode {a.sparse_mode} is not emulated (0 to 4 are)")
    results = [(part, *_attend(a, part, sink)) for part in parts(a)]
    out, lse = place_outputs(a, results)
    if a.attention_out.dtype == torch.int8:
        scale = a.quant_scale2.double()
        offset = 0.0 if a.quant_offset2 is None else a.quant_offset2.double()
        out = (out * scale + offset).round().clamp(-128, 127)
    return out, lse if a.softmax_lse_flag else None


def _attend(a: Any, part: Part, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """out (Lq, N, VD) and lse (Lq, N); rows without keys are 0 and +inf."""
    group = part.query.shape[1] // part.key.shape[1] if part.key.shape[1] else 1
    keys = part.key.repeat_interleave(group, 1).permute(1, 2, 0)  # (N, D, Lkv)
    values = part.value.repeat_interleave(group, 1).transpose(0, 1)  # (N, Lkv, VD)
    scores = part.query.transpose(0, 1) @ keys * a.scale_value  # (N, Lq, Lkv)
    if part.shift is not None:
        scores = scores + part.shift
    scores = scores.masked_fill(part.hidden, -math.inf)
    unseen = part.hidden.all(-1)  # (Lq,); with no keys at all, too
    if not scores.shape[-1]:
        shape = (len(part.query), part.query.shape[1])
        out = torch.zeros((*shape, values.shape[-1]), dtype=torch.float64)
        return out, torch.full(shape, math.inf, dtype=torch.float64)
    lse = scores.logsumexp(-1)  # (N, Lq)
    total = lse if sink is None else torch.logaddexp(lse, sink.double()[:, None])
    weights = (scores - total[..., None]).exp().masked_fill(unseen[:, None], 0.0)
    return (weights @ values).transpose(0, 1), lse.masked_fill(unseen, math.inf).T
