"""The compressed backend inside Hugging Face's DeepSeek-V4 attention modules: same outputs."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the test extra installs transformers")

from dsa_hugging_face import KINDS, Model, run
from half_precision import assert_vendor_close
from latent_schedules import SCHEDULES, Chunk, schedules

from ascend_attn_backends import AscendDSAMetadata
from ascend_attn_ops import sanitize

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
WINDOW_ONLY, SPARSE, HEAVY = range(3)
MODEL = Model.random()
HALF = Model.random(index_topk=64).half(torch.bfloat16)


def compare(
    schedule: list[list[Chunk]], seed: int = 0, model: Model = MODEL, **options: Any
) -> None:
    """Raises AssertionError when a layer differs from the eager module."""
    for found, expected in zip(*run(model, schedule, seed, **options), strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_the_eager_module(schedule: str, block_size: int) -> None:
    compare(SCHEDULES[schedule], block_size=block_size)


@pytest.mark.parametrize("kept", [0, 1, 5])
@pytest.mark.parametrize("k", range(1, 9))
def test_verification_of_k_drafts(k: int, kept: int) -> None:
    """k drafts and the bonus token; keys and states of rejected tokens are overwritten later."""
    accepted = min(kept, k) + 1
    verify = [(accepted, k + 1 - accepted), (1, k)]
    compare([[(21, 0), (13, 0)], verify, verify[::-1], verify, [(1, 0), (1, 0)]], num_spec_tokens=k)


@given(schedules(), st.sampled_from([16, 128]), st.integers(0, 99))
def test_any_schedule(schedule: list[list[Chunk]], block_size: int, seed: int) -> None:
    with sanitize():
        compare(schedule, seed, block_size=block_size)


@given(schedules(), st.sampled_from([16, 128]), st.integers(0, 99))
def test_any_schedule_in_half_precision(
    schedule: list[list[Chunk]], block_size: int, seed: int
) -> None:
    """Attention results of float32 modules on bfloat16 numbers, to the vendor's tolerance.

    All compressed keys are chosen: scores of near equals may change places in half precision.
    """
    results = zip(*run(HALF, schedule, seed, block_size=block_size), strict=True)
    for found, expected in results:
        assert_vendor_close(found, expected, torch.bfloat16)


def test_groups_of_128_tokens() -> None:
    """The ratio that products have, over the boundary of a group with drafts rejected on it."""
    schedule = [[(126, 0), (250, 0)], [(1, 3), (5, 4)], [(1, 1), (1, 0)], [(3, 0), (4, 2)]]
    compare(schedule, model=Model.random(heavy_ratio=128), layers=[HEAVY], block_size=128)


def compressed(metadata: AscendDSAMetadata, **changes: Any) -> AscendDSAMetadata:
    """The step with another compressed side, where it has one."""
    if metadata.compressed is None:
        return metadata
    return attrs.evolve(metadata, compressed=attrs.evolve(metadata.compressed, **changes))


def shifted_groups(metadata: AscendDSAMetadata) -> AscendDSAMetadata:
    """Every token takes the place of the next one in its group."""
    if metadata.compressed is None:
        return metadata
    rows = metadata.compressed.compressor
    later = attrs.evolve(rows, first_positions=rows.first_positions + 1)
    return compressed(metadata, compressor=later)


def one_key_late(metadata: AscendDSAMetadata) -> AscendDSAMetadata:
    """The newest compressed key stays hidden."""
    if metadata.compressed is None:
        return metadata
    return compressed(metadata, key_lens=(metadata.compressed.key_lens - 1).clamp(min=0))


def all_keys(metadata: AscendDSAMetadata) -> AscendDSAMetadata:
    """Compressed keys of later tokens are seen."""
    return compressed(metadata, mask_mode=0)


COMPRESSING = {SPARSE, HEAVY}
CONTROLS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "window one longer": ({"window_change": 1}, {WINDOW_ONLY, *COMPRESSING}),
    "window one shorter": ({"window_change": -1}, {WINDOW_ONLY, *COMPRESSING}),
    "no sinks": ({"without_sinks": True}, {WINDOW_ONLY, *COMPRESSING}),
    "keys rotated one further": ({"position_change": 1}, COMPRESSING),
    "compressor offset by one": ({"change": shifted_groups, "unwritten": 0.0}, COMPRESSING),
    "one key late": ({"change": one_key_late}, COMPRESSING),
    "later keys visible": ({"change": all_keys}, {HEAVY}),
    "no choice": ({"ignore_choice": True}, {SPARSE}),
    "the first keys instead of the best": ({"first_choice": True}, {SPARSE}),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_a_broken_layer_differs(control: str) -> None:
    """The layers that the fault touches differ, the others do not."""
    options, broken = CONTROLS[control]
    results = zip(*run(MODEL, SCHEDULES["prefill at once"], **options), strict=True)
    for layer, (found, expected) in enumerate(results):
        assert found.isfinite().all()
        assert torch.allclose(found, expected, **TOLERANCE) == (layer not in broken), KINDS[layer]


def test_control_rejected_drafts_are_missed_without_their_states() -> None:
    """With too small a k the compressor keeps the last tokens only, and these are rejected."""
    schedule = [[(6, 0)], [(1, 8)], [(1, 8)], [(9, 0)]]
    compare(schedule, num_spec_tokens=8)
    results = zip(*run(MODEL, schedule, num_spec_tokens=0), strict=True)
    equal = [torch.allclose(found, expected, **TOLERANCE) for found, expected in results]
    assert equal == [True, False, False]
