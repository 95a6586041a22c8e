"""fused_infer_attention_score (v1): inference attention over whole or paged keys."""

from __future__ import annotations

from ...registry import register
from .._shared.fused_infer.operators import fused_infer_operator
from .arguments import FusedInferAttentionScoreArguments
from .providers import torch_npu_call
from .rules import CONTRACT
from .samples import samples

fused_infer_attention_score = register(
    fused_infer_operator(CONTRACT, FusedInferAttentionScoreArguments, torch_npu_call, samples)
)
