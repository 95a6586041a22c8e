"""Routing tables of demo 2 as the plugin writes them: its own records, the real selection."""

from __future__ import annotations

import attrs
import torch
from ascend_demo.glm import Variant

from ascend_attn_backends import BackendRequest, select_backend
from ascend_hwprofile import profile_for
from ascend_vllm_plugin import RoutingRow, RoutingTable
from ascend_vllm_plugin.routing import DraftPlans

TARGET = BackendRequest(
    use_mla=True,
    use_sparse=True,
    head_size=576,
    num_heads=4,
    num_kv_heads=1,
    dtype=torch.bfloat16,
    target_model_type="glm_moe_dsa",
    provider="cpu",
)
DRAFT = attrs.evolve(
    TARGET,
    role="draft",
    use_mla=False,
    use_sparse=False,
    head_size=64,
    num_kv_heads=2,
    causal=False,
    speculative=True,
    draft_eager=True,
    draft_architecture="DFlash2DraftModel",
)


def row(request: BackendRequest, profile: str) -> RoutingRow:
    selection = select_backend(request, profile_for(profile))
    return RoutingRow(
        role=request.role,
        kind=f"{request.role}, full attention",
        layers=("layer.0", "layer.1"),
        backend=selection.backend or "none",
        backend_class="fake.Backend",
        chosen_by="selection",
        request={**attrs.asdict(request), "dtype": request.dtype_name},
        verdicts=selection.verdicts,
        gate=selection.gate if request.role == "draft" else (),
    )


def routing(variant: Variant, profile: str, plans: DraftPlans | None) -> str:
    """What the plugin would write: its own records, filled by the real selection."""
    rows = [row(TARGET, profile)]
    if variant.method is not None:
        draft = TARGET if variant.method == "mtp" else DRAFT
        rows.append(row(attrs.evolve(draft, role="draft", draft_flash_attn=variant.gate), profile))
    used = plans if rows[-1].backend == "draft_flash" else None
    table = RoutingTable("simulated", profile, "0.30.0", "fake", None, tuple(rows), used)
    return table.to_json()
