"""The vendor call as data."""

from __future__ import annotations

from ...operator import NpuCall
from .._shared.vendor_call import call_with_outputs
from .arguments import FusedInferAttentionScoreV2Arguments as Args


def torch_npu_call(a: Args) -> NpuCall:
    """Every argument that differs from the schema's default, by name."""
    return call_with_outputs("npu_fused_infer_attention_score_v2", a)
