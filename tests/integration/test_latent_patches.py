"""Patches around latent attention: each still needed, and right where it is applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import environment, run_script
from latent_probe import INDEXER_PATCHES, TOKENS, TOP_K

pytestmark = pytest.mark.engine

POSITIONS = torch.tensor([0, 5, 9])
WITHOUT = {
    "indexer_cache": "key_cache uint8",
    "indexer": "module 'triton' has no attribute",
    "sparse_attn_indexer": "AssertionError",
}
"""Patch -> what happens when all the others are applied."""


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("probes")
    return dict(run_script("latent_probe.py", {}, folder, environment(False))[0])


def turned(rows: torch.Tensor) -> torch.Tensor:
    """Rotation of neighbours [tokens, heads, size] by position / 10000 ** (2i / size)."""
    size = rows.shape[-1]
    angles = POSITIONS[:, None] / 10000 ** (torch.arange(0, size, 2).double() / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = rows[..., ::2], rows[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def rotation_is_right(said: dict[str, Any]) -> bool:
    given, found = (
        [torch.tensor(part, dtype=torch.float64) for part in said[key]]
        for key in ("given", "found")
    )
    return all(
        torch.allclose(part, turned(rows), atol=1e-5)
        for part, rows in zip(found, given, strict=True)
    )


def test_triton_interpreter_is_still_needed(probes: dict[str, Any]) -> None:
    """What it does where it is needed, the engines of test_latent_models.py show."""
    assert probes["has_triton"] is False, "vLLM's V2 runner starts on a CPU now: drop the patch"


def test_rotary_embedding_is_still_needed(probes: dict[str, Any]) -> None:
    assert not rotation_is_right(probes["rotary"]["stock"]["value"]), "drop the patch"


def test_patched_rotary_embedding_rotates(probes: dict[str, Any]) -> None:
    assert rotation_is_right(probes["rotary"]["patched"]["value"])


@pytest.mark.parametrize("patch", INDEXER_PATCHES)
def test_patch_of_the_indexer_is_still_needed(patch: str, probes: dict[str, Any]) -> None:
    assert WITHOUT[patch] in probes["indexer"][patch].get("error", "none: drop the patch")


def test_stock_indexer_does_not_run_on_a_cpu(probes: dict[str, Any]) -> None:
    assert "error" in probes["indexer"]["stock"]


def test_patched_indexer_chooses_the_best_keys(probes: dict[str, Any]) -> None:
    value = probes["indexer"]["patched"]["value"]
    scores = torch.tensor(value["scores"], dtype=torch.float64)
    for token, found in enumerate(value["found"]):
        visible = min(token + 1, TOP_K)
        best = scores[token].topk(visible).indices.tolist()
        assert sorted(key for key in found if key >= 0) == sorted(best)
        assert found.count(-1) == TOP_K - visible
    assert len(value["found"]) == TOKENS > TOP_K
