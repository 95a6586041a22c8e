"""Which layers and products the compressed backend takes, and what it says otherwise."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from dsa_oracle import DsaStep
from test_calls_are_legal import Calls

import ascend_attn_ops
from ascend_attn_backends import (
    AscendDSABackend,
    AscendDSAImpl,
    AscendDSAIndexerBackend,
    AscendDSAMetadata,
    AscendDSAMetadataBuilder,
    BackendRequest,
    DsaCompression,
    get_attn_backend_cls,
    select_backend,
)
from ascend_hwprofile import profile_for

FAMILIES = ["A3", "A5"]
LAYER = BackendRequest(
    use_mla=True,
    use_compress=True,
    compress_ratio=4,
    compressed_top_k=512,
    head_size=512,
    num_heads=64,
    num_kv_heads=1,
    dtype=torch.bfloat16,
    sliding_window=128,
    has_sinks=True,
)
INDEXER = attrs.evolve(LAYER, head_size=128, has_sinks=False, sliding_window=None)


def rules(request: BackendRequest, family: str) -> set[str]:
    return {entry.rule for entry in AscendDSABackend.refusals(request, profile_for(family))}


def index_rules(request: BackendRequest, family: str) -> set[str]:
    return {entry.rule for entry in AscendDSAIndexerBackend.refusals(request, profile_for(family))}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"compress_ratio": 128, "compressed_top_k": None},
        {"compress_ratio": 1, "compressed_top_k": None},
        {"compressed_top_k": 1024},
        {"num_heads": 128},
        {"block_size": 16},
        {"block_size": 2048},
        {"dtype": torch.float16},
        {"has_sinks": False},
        {"sliding_window": None},
        {"role": "draft"},
    ],
)
def test_what_dsa_takes(change: dict[str, Any], family: str) -> None:
    selection = select_backend(attrs.evolve(LAYER, **change), profile_for(family))
    assert selection.backend == selection.architecture == "dsa"
    assert selection.architecture_refusals == ()
    backend = selection.backend_class
    assert backend is AscendDSABackend
    assert backend.metadata_class is AscendDSAMetadata
    assert backend.builder_class is AscendDSAMetadataBuilder
    assert backend.impl_class is AscendDSAImpl


@pytest.mark.parametrize("use_sparse", [True, False])
def test_the_plain_table(use_sparse: bool) -> None:
    found = get_attn_backend_cls(use_mla=True, use_sparse=use_sparse, use_compress=True)
    assert found is AscendDSABackend


REFUSED = {
    "dsa.use_mla": {"use_mla": False},
    "dsa.use_compress": {"use_compress": False},
    "dsa.attn_type": {"attn_type": "encoder_only"},
    "dsa.causal": {"causal": False},
    "dsa.has_multimodal_prefix": {"has_multimodal_prefix": True},
    "dsa.has_alibi": {"has_alibi": True},
    "dsa.logits_soft_cap": {"logits_soft_cap": 30.0},
    "dsa.context_parallel_size": {"context_parallel_size": 2},
    "dsa.kv_cache_dtype": {"kv_cache_dtype": "fp8_e4m3"},
    "dsa.compressed_top_k": {"compress_ratio": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", REFUSED)
def test_what_dsa_refuses(rule: str, family: str) -> None:
    assert rules(attrs.evolve(LAYER, **REFUSED[rule]), family) == {rule}


@pytest.mark.parametrize(
    ("change", "family", "rule"),
    [
        ({"num_heads": 96}, "A3", "sparse_flash_mla.heads_a2_a3"),
        ({"num_heads": 129}, "A5", "sparse_flash_mla.heads"),
        ({"head_size": 576}, "A5", "sparse_flash_mla.head_size"),
        ({"num_kv_heads": 2}, "A5", "sparse_flash_mla.kv_heads"),
        ({"sliding_window": 256}, "A3", "sparse_flash_mla.windows_a2_a3"),
        ({"compressed_top_k": 2048}, "A3", "sparse_flash_mla.topk_a2_a3"),
        ({"compress_ratio": 8}, "A3", "sparse_flash_mla.cmp_ratio_a2_a3"),
        ({"compress_ratio": 8}, "A5", "compressor.cmp_ratio"),
        ({"compressed_top_k": None}, "A5", "compressor.combination"),
        ({"block_size": 24}, "A5", "compressor.block_size"),
        ({"dtype": torch.float32}, "A5", "sparse_flash_mla.half"),
    ],
)
def test_limits_come_from_the_operators(change: dict[str, Any], family: str, rule: str) -> None:
    assert rule in rules(attrs.evolve(LAYER, **change), family)


@pytest.mark.parametrize("provider", [None, "cpu"])
@pytest.mark.parametrize("family", ["A2", "310P"])
def test_products_without_a_compressor_are_refused_even_when_simulated(
    family: str, provider: str | None
) -> None:
    request = attrs.evolve(LAYER, dtype=torch.float16, provider=provider)
    selection = select_backend(request, profile_for(family))
    assert selection.backend is None
    (verdict,) = (entry for entry in selection.verdicts if entry.backend == "dsa")
    (refusal,) = verdict.refusals
    assert refusal.rule == "dsa.capability"
    assert "operator compressor is not supported" in refusal.found
    assert {entry.rule for entry in selection.architecture_refusals} == {"table.capability"}
    assert index_rules(attrs.evolve(INDEXER, provider=provider), family) == {
        "dsa_indexer.capability"
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_indexer(family: str) -> None:
    assert index_rules(INDEXER, family) == set()
    assert index_rules(attrs.evolve(INDEXER, kv_cache_dtype="int8"), family) == {
        "dsa_indexer.kv_cache_dtype"
    }
    assert "lightning_indexer.head_size" in index_rules(attrs.evolve(INDEXER, head_size=64), family)
    too_many = index_rules(attrs.evolve(INDEXER, num_heads=65), family)
    assert any(rule.startswith("lightning_indexer.heads") for rule in too_many)
    nothing = attrs.evolve(INDEXER, compress_ratio=1, compressed_top_k=None)
    assert index_rules(nothing, family) == {"dsa_indexer.compressed_top_k"}


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_taken_where_the_product_is_simulated(family: str) -> None:
    simulated = attrs.evolve(LAYER, dtype=torch.float32, provider="cpu")
    assert rules(simulated, family) == set()


def product_step(compression: DsaCompression | None, **changes: Any) -> DsaStep:
    """A step in the sizes that products take."""
    sizes = {"size": 512, "index_size": 128, "hidden_size": 1024, "rope": 64, "window": 128}
    return DsaStep(
        [5, 1, 9],
        [140, 131, 9],
        compression,
        **{**sizes, "dtype": torch.bfloat16, "num_spec_tokens": 8, **changes},
    )


PRODUCT_KINDS = {
    "window": None,
    "sparse": DsaCompression(4, top_k=512),
    "heavy": DsaCompression(128),
}
OPERATORS = {"sparse_flash_mla", "sparse_flash_mla_metadata", "scatter_pa_kv_cache"}


@pytest.mark.parametrize("kind", PRODUCT_KINDS)
def test_calls_are_legal_on_products(kind: str) -> None:
    """Every operator call of a layer, judged as CANN would on A3 and A5."""
    step = product_step(PRODUCT_KINDS[kind])
    with Calls() as calls:
        step.run()
    names = {name for name, _ in calls.made}
    more = {"window": set(), "sparse": {"compressor", "lightning_indexer"}, "heavy": {"compressor"}}
    assert names == OPERATORS | more[kind]
    for family in FAMILIES:
        profile = profile_for(family)
        for name, args in calls.made:
            assert ascend_attn_ops.check(name, args, profile) == []


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"window": 64}, "sparse_flash_mla.windows_a2_a3"),
        ({"compression": DsaCompression(4, top_k=64)}, "sparse_flash_mla.topk_a2_a3"),
        ({"hidden_size": 1000}, "compressor.hidden_size"),
        ({"dtype": torch.float32}, "compressor.half"),
    ],
)
def test_control_other_sizes_are_refused(changes: dict[str, Any], rule: str) -> None:
    compression = changes.pop("compression", PRODUCT_KINDS["sparse"])
    with Calls() as calls:
        product_step(compression, **changes).run()
    profile = profile_for("A3")
    found = [
        r.rule for name, args in calls.made for r in ascend_attn_ops.check(name, args, profile)
    ]
    assert rule in found


def test_cache_shapes() -> None:
    shape = AscendDSABackend.cache_shape(7, 128, DsaCompression(4, 512))
    assert shape.window.logical == (7, 1, 128, 512)
    assert shape.compressed == shape.window
    assert shape.index.logical == (7, 1, 128, 128)
    assert [state.shape for state in shape.state.allocate()] == [(7, 128, 1024)] * 2
    assert shape.index_state.bytes_per_token == 2 * 256 * 4
    assert shape.state.num_bytes == 7 * 128 * 2 * 1024 * 4
    plain = AscendDSABackend.cache_shape(7, 128)
    assert plain.compressed is plain.index is plain.state is plain.index_state is None
    heavy = AscendDSABackend.cache_shape(7, 16, DsaCompression(128))
    assert heavy.index is heavy.index_state is None
    assert heavy.state.width == 512
