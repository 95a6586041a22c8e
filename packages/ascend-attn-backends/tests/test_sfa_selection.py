"""Which layers and products the sparse backends take, and what they say otherwise."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from operator_calls import Calls
from sparse_oracle import SparseStep

import ascend_attn_ops
from ascend_attn_backends import (
    AscendSFABackend,
    AscendSFAIndexerBackend,
    BackendRequest,
    get_attn_backend_cls,
    select_backend,
)
from ascend_hwprofile import profile_for

FAMILIES = ["A2", "A3", "A5"]
LAYER = BackendRequest(
    use_mla=True,
    use_sparse=True,
    head_size=576,
    num_heads=16,
    num_kv_heads=1,
    dtype=torch.bfloat16,
)
INDEXER = BackendRequest(head_size=128, num_heads=32, num_kv_heads=1, dtype=torch.bfloat16)


def rules(request: BackendRequest, family: str) -> set[str]:
    return {entry.rule for entry in AscendSFABackend.refusals(request, profile_for(family))}


def index_rules(request: BackendRequest, family: str) -> set[str]:
    return {entry.rule for entry in AscendSFAIndexerBackend.refusals(request, profile_for(family))}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_heads": 128},
        {"block_size": 16},
        {"block_size": 2048},
        {"dtype": torch.float16},
        {"causal": False},
        {"role": "draft"},
    ],
)
def test_what_sfa_takes(change: dict[str, Any], family: str) -> None:
    selection = select_backend(attrs.evolve(LAYER, **change), profile_for(family))
    assert selection.backend == selection.architecture == "sfa"
    assert selection.backend_class is AscendSFABackend
    assert get_attn_backend_cls(use_mla=True, use_sparse=True) is AscendSFABackend


REFUSED = {
    "sfa.use_mla": {"use_mla": False},
    "sfa.use_sparse": {"use_sparse": False},
    "sfa.use_compress": {"use_compress": True},
    "sfa.attn_type": {"attn_type": "encoder_only"},
    "sfa.sliding_window": {"sliding_window": 4096},
    "sfa.has_sinks": {"has_sinks": True},
    "sfa.has_multimodal_prefix": {"has_multimodal_prefix": True},
    "sfa.has_alibi": {"has_alibi": True},
    "sfa.logits_soft_cap": {"logits_soft_cap": 30.0},
    "sfa.kv_cache_dtype": {"kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", REFUSED)
def test_what_sfa_refuses(rule: str, family: str) -> None:
    assert rules(attrs.evolve(LAYER, **REFUSED[rule]), family) == {rule}


@pytest.mark.parametrize(
    ("change", "family", "rule"),
    [
        ({"num_heads": 96}, "A3", "heads_a2_a3"),
        ({"num_heads": 129}, "A5", "heads_a5"),
        ({"head_size": 640}, "A2", "head_size"),
        ({"block_size": 24}, "A5", "block_size"),
        ({"num_kv_heads": 2}, "A5", "kv_heads"),
        ({"dtype": torch.float32}, "A5", "half"),
    ],
)
def test_limits_come_from_the_operators(change: dict[str, Any], family: str, rule: str) -> None:
    assert f"sparse_flash_attention.{rule}" in rules(attrs.evolve(LAYER, **change), family)


@pytest.mark.parametrize("provider", [None, "cpu"])
def test_310p_is_refused_with_the_reason_even_when_simulated(provider: str | None) -> None:
    profile = profile_for("310P")
    request = attrs.evolve(LAYER, dtype=torch.float16, provider=provider)
    selection = select_backend(request, profile)
    assert selection.backend is None
    (verdict,) = (entry for entry in selection.verdicts if entry.backend == "sfa")
    (refusal,) = verdict.refusals
    assert refusal.rule == "sfa.capability"
    assert "sparse_flash_attention is not supported" in refusal.found
    (refusal,) = AscendSFAIndexerBackend.refusals(attrs.evolve(INDEXER, provider=provider), profile)
    assert refusal.rule == "sfa_indexer.capability"
    assert "lightning_indexer is not supported" in refusal.found


def test_float32_is_taken_where_the_product_is_simulated() -> None:
    for family in FAMILIES:
        assert rules(attrs.evolve(LAYER, dtype=torch.float32, provider="cpu"), family) == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_indexer_takes(family: str) -> None:
    assert index_rules(INDEXER, family) == set()


@pytest.mark.parametrize(
    ("change", "family", "rule"),
    [
        ({"num_heads": 65}, "A3", "lightning_indexer.heads"),
        ({"num_heads": 12}, "A5", "lightning_indexer.heads_a5"),
        ({"head_size": 64}, "A2", "lightning_indexer.head_size"),
        ({"kv_cache_dtype": "fp8"}, "A5", "sfa_indexer.kv_cache_dtype"),
    ],
)
def test_what_the_indexer_refuses(change: dict[str, Any], family: str, rule: str) -> None:
    assert rule in index_rules(attrs.evolve(INDEXER, **change), family)


def call_rules(step: SparseStep, family: str) -> set[str]:
    with Calls() as calls:
        step.run()
    names = ["scatter_pa_kv_cache"] * 2 + ["lightning_indexer", "sparse_flash_attention"]
    assert [name for name, _ in calls.made] == names
    found = [ascend_attn_ops.check(*call, profile_for(family)) for call in calls.made]
    return {refusal.rule for refusals in found for refusal in refusals}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_size", "kernel"), [(16, None), (128, None), (256, 128)])
def test_calls_are_legal(family: str, block_size: int, kernel: int | None) -> None:
    step = SparseStep(
        [5, 1, 4],
        [5, 300, 70],
        block_size=block_size,
        kernel_block_size=kernel,
        dtype=torch.bfloat16,
    )
    assert call_rules(step, family) == set()


def test_control_one_tensor_for_both_parts_is_refused_by_products() -> None:
    step = SparseStep([2], [9], one_tensor=True, dtype=torch.bfloat16)
    assert "sparse_flash_attention.cache_strides" in call_rules(step, "A3")
