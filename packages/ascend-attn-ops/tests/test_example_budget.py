"""Every operator family meets at least this many generated cases in one run of all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

EXAMPLES = 2000
FAMILIES = {
    "inference attention": (
        "test_fused_infer_attention_score",
        "test_fia_layouts",
        "test_paged_attention",
    ),
    "flash_attn": ("test_flash_attn", "test_flash_attn_metadata"),
    "sparse attention": ("test_sparse_flash_attention", "test_kv_quant_sparse_flash_attention"),
    "indexers": ("test_lightning_indexer", "test_quant_lightning_indexer"),
    "cache": ("test_scatter_pa_kv_cache", "test_gather_pa_kv_cache", "test_reshape_and_cache"),
    "merge": ("test_attention_update", "test_ring_attention_update", "test_partial"),
    "rope, norm and prolog": ("test_rotary", "test_kv_rmsnorm_rope_cache", "test_mla_prolog"),
}


def generated_cases(items: list[pytest.Item], modules: tuple[str, ...]) -> int:
    """Sum of the example counts of the hypothesis tests in these modules."""
    total = 0
    for item in items:
        function = getattr(item, "obj", None)
        if item.path.stem in modules and getattr(function, "is_hypothesis_test", False):
            chosen = getattr(function, "_hypothesis_internal_use_settings", settings.default)
            total += (chosen or settings.default).max_examples
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_family_meets_its_budget(family: str, request: pytest.FixtureRequest) -> None:
    if settings.default.max_examples < settings.get_profile("ci").max_examples:
        pytest.skip("the chosen hypothesis profile is a short one")
    items = request.session.items
    if not set(FAMILIES[family]) <= {item.path.stem for item in items}:
        pytest.skip("only a part of the tests was collected")
    assert generated_cases(items, FAMILIES[family]) >= EXAMPLES
