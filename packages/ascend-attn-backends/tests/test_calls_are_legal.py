"""The operator calls that layers make keep CANN's contract on every product that has them."""

from __future__ import annotations

import pytest
import torch
from attn_backends_support import Scenario, steps
from hypothesis import given
from hypothesis import strategies as st
from operator_calls import Calls

import ascend_attn_ops
from ascend_attn_backends import AscendAttentionBackend, BackendRequest
from ascend_attn_ops import Refusal, use_profile
from ascend_hwprofile import HardwareProfile, profile_for

FAMILIES = ["A2", "A3", "A5"]


def refusals(scenario: Scenario, profile: HardwareProfile) -> list[Refusal]:
    """What CANN would refuse of the calls of one layer."""
    with Calls() as calls:
        scenario.run()
    names = [name for name, _ in calls.made]
    assert names[0] == "scatter_pa_kv_cache"
    assert set(names[1:]) == {"fused_infer_attention_score"}
    return [r for name, args in calls.made for r in ascend_attn_ops.check(name, args, profile)]


@given(
    steps(),
    st.sampled_from(FAMILIES),
    st.sampled_from([16, 128]),
    st.none() | st.integers(1, 50),
    st.booleans(),
)
def test_any_step_is_legal(
    step: tuple[list[int], list[int]],
    family: str,
    block_size: int,
    window: int | None,
    causal: bool,
) -> None:
    scenario = Scenario(
        *step,
        block_size=block_size,
        head_size=64,
        window=window,
        causal=[causal, *[True] * (len(step[0]) - 1)],
        dtype=torch.bfloat16,
    )
    assert refusals(scenario, profile_for(family)) == []


def test_control_memory_that_the_writer_does_not_take_is_refused() -> None:
    scenario = Scenario([3], [20], head_size=64, dtype=torch.bfloat16, token_major=False)
    found = refusals(scenario, profile_for("A2"))
    assert {entry.rule for entry in found} == {"scatter_pa_kv_cache.contiguous"}


def test_allocated_caches_are_memory_that_the_writer_takes() -> None:
    scenario = Scenario([3], [20], head_size=64, dtype=torch.bfloat16)
    shape = AscendAttentionBackend.cache_shape(scenario.key_cache.shape[0], 16, 2, 64)
    scenario.key_cache, scenario.value_cache = (shape.allocate(torch.bfloat16) for _ in range(2))
    assert refusals(scenario, profile_for("A2")) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_results_do_not_depend_on_the_profile(family: str) -> None:
    scenario = Scenario([4, 1, 9], [20, 5, 9], head_size=64, dtype=torch.bfloat16)
    expected = scenario.run()
    with use_profile(profile_for(family)):
        output = scenario.run()
    assert torch.equal(output, expected)
    scenario.compare(output)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("head_size", "block_size", "dtype"),
    [
        (64, 16, torch.float32),
        (128, 128, torch.bfloat16),
        (80, 16, torch.bfloat16),
        (64, 24, torch.float16),
    ],
)
def test_selection_and_operator_agree(
    family: str, head_size: int, block_size: int, dtype: torch.dtype
) -> None:
    """What the selection takes runs, and what it refuses is refused with the same rules."""
    request = BackendRequest(
        head_size=head_size,
        num_heads=4,
        num_kv_heads=2,
        dtype=dtype,
        block_size=block_size,
        provider="cpu",
    )
    profile = profile_for(family)
    expected = {entry.rule for entry in AscendAttentionBackend.refusals(request, profile)}
    scenario = Scenario([3], [20], head_size=head_size, block_size=block_size, dtype=dtype)
    found: set[str] = set()
    with use_profile(profile):
        try:
            scenario.compare(scenario.run())
        except ascend_attn_ops.OpArgumentError as error:
            found = {entry.rule for entry in error.refusals}
    assert found == expected
