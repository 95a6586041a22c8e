"""The latent backend inside Hugging Face's DeepSeek-V3 module: same weights, same outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the test extra installs transformers")

from latent_hugging_face import OursMLA, OursMLAOnRanks, deepseek_v3
from latent_schedules import SCHEDULES, schedules
from sparse_hugging_face import Chunk, run

from ascend_attn_backends import BackendRequest, select_backend
from ascend_hwprofile import profile_for

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def ours(block_size: int = 16, **changes: Any) -> OursMLA:
    return OursMLA(deepseek_v3(), block_size, 32 if block_size == 16 else 8, **changes)


def compare(layer: OursMLA | OursMLAOnRanks, schedule: list[list[Chunk]], seed: int = 0) -> None:
    ((found,), (expected,)) = run(layer, schedule, seed)
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_the_eager_module(schedule: str, block_size: int) -> None:
    compare(ours(block_size), SCHEDULES[schedule])


@pytest.mark.parametrize("kept", [0, 1, 5])
@pytest.mark.parametrize("k", range(1, 9))
def test_verification_of_k_drafts(k: int, kept: int) -> None:
    """k drafts and the bonus token; rejected rows stay in the cache until they are overwritten."""
    accepted = min(kept, k) + 1
    verify = [(accepted, k + 1 - accepted), (1, k)]
    compare(ours(), [[(21, 0), (13, 0)], verify, verify[::-1], [(1, 0), (1, 0)]])


@given(schedules(), st.sampled_from([16, 128]), st.booleans(), st.integers(0, 99))
def test_any_schedule(
    schedule: list[list[Chunk]], block_size: int, combined: bool, seed: int
) -> None:
    compare(ours(block_size, combined_cache=combined, partial=combined), schedule, seed)


CONTROLS = {
    "scale of the nope part alone": {"scale_change": (80 / 16) ** 0.5},
    "later keys visible": {"causal": False},
}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_a_broken_layer_differs(control: str) -> None:
    ((found,), (expected,)) = run(ours(**CONTROLS[control]), SCHEDULES["prefill at once"])
    assert found.isfinite().all()
    assert not torch.allclose(found, expected, **TOLERANCE)


def on_ranks(size: int, block_size: int = 16, **changes: Any) -> OursMLAOnRanks:
    num_blocks = 32 if block_size == 16 else 8
    return OursMLAOnRanks(deepseek_v3(), block_size, num_blocks, size, **changes)


@given(schedules(), st.sampled_from([16, 128]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]))
def test_any_schedule_on_any_number_of_ranks(
    schedule: list[list[Chunk]], block_size: int, size: int, interleave: int
) -> None:
    compare(on_ranks(size, block_size, interleave=interleave), schedule)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_equal_the_eager_module(schedule: str, size: int) -> None:
    compare(on_ranks(size), SCHEDULES[schedule])


def test_control_lengths_of_another_interleave_differ() -> None:
    layer = on_ranks(2, read_interleave=16)
    ((found,), (expected,)) = run(layer, SCHEDULES["prefill then verification"])
    assert not torch.allclose(found, expected, **TOLERANCE)


@pytest.mark.parametrize("family", ["A2", "A3", "A5"])
def test_selection_takes_the_layer(family: str) -> None:
    request = BackendRequest(
        use_mla=True, head_size=576, num_heads=128, num_kv_heads=1, dtype=torch.bfloat16
    )
    selection = select_backend(request, profile_for(family))
    assert selection.backend == "mla"
    assert selection.architecture_refusals == ()
