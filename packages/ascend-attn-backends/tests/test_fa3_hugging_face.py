"""The FA3 backend inside Hugging Face's Qwen3 module: same weights, same outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the test extra installs transformers")

from half_precision import assert_vendor_close, attention_results, rounded
from latent_schedules import SCHEDULES, Chunk, schedules
from qwen3_hugging_face import PagedQwen3, qwen3
from sparse_hugging_face import run

from ascend_attn_backends import AscendFABackend

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def ours(block_size: int = 16, **changes: Any) -> PagedQwen3:
    return PagedQwen3(
        qwen3(), AscendFABackend, block_size, 32 if block_size == 16 else 8, **changes
    )


def compare(block_size: int, schedule: list[list[Chunk]], seed: int = 0) -> None:
    ((found,), (expected,)) = run(ours(block_size), schedule, seed)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def compare_half(block_size: int, schedule: list[list[Chunk]], seed: int = 0) -> None:
    layer = ours(block_size, dtype=torch.bfloat16)
    rounded(layer.found)
    ((found,), (expected,)) = run(layer, schedule, seed, attention_results)
    assert_vendor_close(found, expected, torch.bfloat16)


@pytest.mark.parametrize("check", [compare, compare_half])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_the_eager_module(schedule: str, block_size: int, check: Any) -> None:
    check(block_size, SCHEDULES[schedule])


@pytest.mark.parametrize("check", [compare, compare_half])
@pytest.mark.parametrize("k", range(1, 9))
def test_verification_of_k_drafts(k: int, check: Any) -> None:
    """k drafts and the bonus token; rejected rows stay in the cache until they are overwritten."""
    accepted = k // 2 + 1
    verify = [(accepted, k + 1 - accepted), (1, k)]
    check(16, [[(21, 0), (13, 0)], verify, verify[::-1], [(1, 0), (1, 0)]])


@given(schedules(), st.sampled_from([16, 128]), st.booleans(), st.integers(0, 99))
def test_any_schedule(schedule: list[list[Chunk]], block_size: int, half: bool, seed: int) -> None:
    (compare_half if half else compare)(block_size, schedule, seed)


CONTROLS = {"another scale": {"scale_change": 1.02}, "later keys visible": {"causal": False}}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_a_broken_layer_differs(control: str) -> None:
    ((found,), (expected,)) = run(ours(**CONTROLS[control]), SCHEDULES["prefill at once"])
    assert found.isfinite().all()
    assert not torch.allclose(found, expected, **TOLERANCE)
    layer = ours(dtype=torch.bfloat16, **CONTROLS[control])
    rounded(layer.found)
    ((found,), (expected,)) = run(layer, SCHEDULES["prefill at once"], 0, attention_results)
    with pytest.raises(AssertionError, match="elements outside"):
        assert_vendor_close(found, expected, torch.bfloat16)
