"""Backends over shared keys, heads and tokens inside Hugging Face's modules: same outputs.

Decode context parallelism of dense latent attention has its test in test_mla_hugging_face.py.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the test extra installs transformers")

from cp_hugging_face import LatentOnRanks, Qwen3OnRanks, SparseOnRanks, run, run_compressed
from cp_support import SHARED_KEYS, SPREAD, Layout, layouts
from dsa_hugging_face import Model
from latent_hugging_face import deepseek_v3
from latent_schedules import SCHEDULES, Chunk, schedules
from qwen3_hugging_face import qwen3
from sparse_hugging_face import family

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
MODEL = Model.random()
FEW = settings(max_examples=max(settings.default.max_examples // 4, 2))
"""Each of these is some twenty steps of several ranks; the steps alone have tests of their own."""
Schedule = list[list[Chunk]]


def compare(layer: Any, schedule: Schedule, seed: int = 0) -> None:
    """Raises AssertionError when a layer differs from the eager module."""
    for found, expected in zip(*run(layer, schedule, seed), strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_qwen3(schedule: str, size: int) -> None:
    compare(Qwen3OnRanks(qwen3(), Layout(heads=size)), SCHEDULES[schedule])


@FEW
@given(schedules(), layouts(SPREAD), st.integers(0, 99))
def test_deepseek_v3_with_spread_tokens(schedule: Schedule, layout: Layout, seed: int) -> None:
    compare(LatentOnRanks(deepseek_v3(), layout), schedule, seed)


@pytest.mark.parametrize("layout", [Layout(heads=4), Layout(tokens=2, heads=2)], ids=["4", "2x2"])
@pytest.mark.parametrize("name", ["glm_moe_dsa", "deepseek_v32"])
def test_sparse_families(name: str, layout: Layout) -> None:
    compare(SparseOnRanks(family(name), layout), SCHEDULES["prefill then verification"])
    compare(SparseOnRanks(family(name), layout), SCHEDULES["mixed"])


@FEW
@given(schedules(), layouts([*SHARED_KEYS[1:], *SPREAD]), st.integers(0, 99))
def test_glm_on_any_layout(schedule: Schedule, layout: Layout, seed: int) -> None:
    """Its second layer reuses the choice of the first."""
    compare(SparseOnRanks(family("glm_moe_dsa"), layout), schedule, seed)


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        *((Layout(heads=4), schedule) for schedule in SCHEDULES),
        (Layout(heads=2, interleave=3), "prefill then verification"),
        (Layout(heads=2, interleave=20), "mixed"),
    ],
)
def test_deepseek_v4(layout: Layout, schedule: str) -> None:
    results = run_compressed(MODEL, layout, SCHEDULES[schedule], seed=0)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_control_keys_of_another_owner_differ() -> None:
    layout = attrs.evolve(Layout(heads=2), interleave=2, read_interleave=3)
    ((found,), (expected,)) = run(Qwen3OnRanks(qwen3(), layout), SCHEDULES["prefill then decode"])
    assert not torch.allclose(found, expected, **TOLERANCE)
