"""The sparse backends inside Hugging Face's attention modules: same weights, same outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the test extra installs transformers")

from sparse_hugging_face import Chunk, Ours, family, run

from ascend_attn_backends import IndexRope

FAMILIES = ["glm_moe_dsa", "deepseek_v32"]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
# (kept, rejected) tokens that each step adds to each of three requests.
SCHEDULES: dict[str, list[list[Chunk]]] = {
    "prefill at once": [[(37, 0), (5, 0), (20, 0)]],
    "chunks": [[(16, 0), (5, 0), (7, 0)], [(16, 0), (0, 0), (7, 0)], [(5, 0), (0, 0), (6, 0)]],
    "prefill then decode": [[(35, 0), (3, 0), (18, 0)], *[[(1, 0)] * 3] * 3],
    "prefill then verification": [
        [(29, 0), (1, 0), (12, 0)],
        [(4, 0), (2, 2), (1, 3)],
        [(1, 3), (3, 1), (4, 0)],
    ],
    "mixed": [[(20, 0), (0, 0), (19, 0)], [(16, 0), (1, 0), (1, 0)], [(1, 0), (1, 3), (0, 0)]],
}


def ours(name: str, block_size: int = 16, **changes: Any) -> Ours:
    return Ours(family(name), block_size, num_blocks=32 if block_size == 16 else 8, **changes)


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_eager_module(name: str, schedule: str, block_size: int) -> None:
    for found, expected in zip(*run(ours(name, block_size), SCHEDULES[schedule]), strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("kept", [0, 1, 5])
@pytest.mark.parametrize("k", range(1, 9))
def test_verification_of_k_drafts(k: int, kept: int) -> None:
    """k drafts and the bonus token; rejected rows stay in the cache until they are overwritten."""
    accepted = min(kept, k) + 1
    verify = [(accepted, k + 1 - accepted), (1, k)]
    schedule = [[(21, 0), (13, 0)], verify, verify[::-1], [(1, 0), (1, 0)]]
    for found, expected in zip(*run(ours("glm_moe_dsa"), schedule), strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE)


CHUNKS = st.one_of(
    st.tuples(st.sampled_from([0, 1, 1, 2, 9, 17, 30]), st.just(0)),
    st.integers(1, 8).flatmap(
        lambda k: st.integers(1, k + 1).map(lambda accepted: (accepted, k + 1 - accepted))
    ),
)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[Chunk]]:
    requests = draw(st.integers(1, 3))
    step = st.lists(CHUNKS, min_size=requests, max_size=requests)
    first = [(draw(st.sampled_from([1, 6, 14, 31])), 0) for _ in range(requests)]
    return [first, *draw(st.lists(step, max_size=3))]


@given(st.sampled_from(FAMILIES), schedules(), st.sampled_from([16, 128]), st.integers(0, 99))
def test_any_schedule(name: str, schedule: list[list[Chunk]], block_size: int, seed: int) -> None:
    for found, expected in zip(*run(ours(name, block_size), schedule, seed), strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("kernel", [16, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_logical_blocks_seen_as_kernel_blocks(name: str, kernel: int) -> None:
    layer = ours(name, 128, kernel_block_size=kernel)
    for found, expected in zip(*run(layer, SCHEDULES["chunks"]), strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE)


CONTROLS = {
    "half rotation in an interleaved indexer": {"style": IndexRope.HALF},
    "one key less": {"top_k": 11},
    "scale of the nope part alone": {"scale_change": (80 / 16) ** 0.5},
    "later keys visible": {"causal": False},
    "no choice": {"forget_choice": True},
}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_a_broken_layer_differs(control: str) -> None:
    layer = ours("glm_moe_dsa", **CONTROLS[control])
    for found, expected in zip(*run(layer, SCHEDULES["prefill at once"]), strict=True):
        assert found.isfinite().all()
        assert not torch.allclose(found, expected, **TOLERANCE)


def test_control_interleaved_rotation_in_a_half_indexer_differs() -> None:
    layer = ours("deepseek_v32", style=IndexRope.INTERLEAVED)
    ((found,), (expected,)) = run(layer, SCHEDULES["prefill at once"])
    assert not torch.allclose(found, expected, **TOLERANCE)
