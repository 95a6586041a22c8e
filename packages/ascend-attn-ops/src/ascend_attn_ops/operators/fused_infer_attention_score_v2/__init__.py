"""fused_infer_attention_score_v2: inference attention with sinks and query quantisation."""

from __future__ import annotations

from ...registry import register
from .._shared.fused_infer.operators import fused_infer_operator
from .arguments import FusedInferAttentionScoreV2Arguments
from .providers import torch_npu_call
from .rules import CONTRACT
from .samples import samples

fused_infer_attention_score_v2 = register(
    fused_infer_operator(CONTRACT, FusedInferAttentionScoreV2Arguments, torch_npu_call, samples)
)
