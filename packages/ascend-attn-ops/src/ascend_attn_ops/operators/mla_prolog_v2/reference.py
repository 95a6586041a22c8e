"""The formula of version 3 with the outputs of version 2."""

from __future__ import annotations

import torch

from ..mla_prolog_v3.reference import prepare, shaped
from .arguments import MlaPrologV2Arguments as Args


def run_reference(a: Args) -> tuple[torch.Tensor, ...]:
    """query, query_rope, kv_cache, kr_cache, dequant_scale_q_nope."""
    call = a.as_v3()
    done = prepare(call)
    scale = torch.zeros(1) if done.query_scale is None else done.query_scale
    return shaped(call, done.query), shaped(call, done.query_rope), a.kv_cache, a.kr_cache, scale
