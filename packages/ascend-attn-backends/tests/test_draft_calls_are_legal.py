"""The operator calls of draft layers keep CANN's contract on the products that have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_backends_support import Scenario, steps
from draft_flash_support import run_draft
from hypothesis import given
from hypothesis import strategies as st
from operator_calls import Calls

import ascend_attn_ops
from ascend_attn_backends import AttentionBatch, draft_step
from ascend_attn_ops import Refusal
from ascend_hwprofile import profile_for

OPERATORS = ["flash_attn", "flash_attn_metadata", "scatter_pa_kv_cache"]


def refusals(scenario: Scenario, batch: AttentionBatch | None = None, **more: Any) -> list[Refusal]:
    """What CANN would refuse of the calls of one layer on an A5, tensor values included."""
    with Calls() as calls:
        run_draft(scenario, batch, **more)
    assert sorted(name for name, _ in calls.made) == OPERATORS
    profile = profile_for("A5")
    found = [r for name, args in calls.made for r in ascend_attn_ops.check(name, args, profile)]
    for name, args in calls.made:
        found += ascend_attn_ops.operator_named(name).contract.broken_values(args, profile)
    return found


@given(
    steps(),
    st.sampled_from([16, 128]),
    st.sampled_from([64, 128]),
    st.none() | st.integers(1, 50),
    st.booleans(),
    st.integers(0, 4),
    st.data(),
)
def test_any_step_is_legal(
    step: tuple[list[int], list[int]],
    block_size: int,
    head_size: int,
    window: int | None,
    causal: bool,
    padding: int,
    data: st.DataObject,
) -> None:
    scenario = Scenario(
        *step,
        block_size=block_size,
        head_size=head_size,
        window=window,
        causal=causal,
        dtype=torch.bfloat16,
    )
    gone = [data.draw(st.integers(0, length)) for length in step[0]]
    batch = scenario.batch()
    batch = batch.padded(batch.num_rows + padding, batch.num_token_rows + padding)
    assert refusals(scenario, batch) == []
    assert refusals(scenario, batch, num_rejected=torch.tensor(gone, dtype=torch.int32)) == []


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_draft_steps_up_to_the_end_are_legal(offset: int) -> None:
    scenario = Scenario([1, 1], [30, 31], head_size=64, dtype=torch.float16)
    verified = AttentionBatch.from_lengths([1, 1], [29, 31], 16, block_table=scenario.block_table)
    step = draft_step(
        verified, torch.tensor([0, 1], dtype=torch.int32), offset=offset, query_len=1,
        block_size=16, max_model_len=31,
    )  # fmt: skip
    assert refusals(scenario, step.batch, num_rejected=step.num_unused) == []


def engine_caches(scenario: Scenario) -> None:
    """Keys and values of a block side by side, as vLLM allocates them: [blocks, 2, ...]."""
    blocks, kv_heads, block_size, size = scenario.key_cache.shape
    memory = torch.zeros(blocks, 2, block_size, kv_heads, size, dtype=scenario.dtype)
    for index, cache in enumerate((scenario.key_cache, scenario.value_cache)):
        memory[:, index] = cache.transpose(1, 2)
    scenario.key_cache, scenario.value_cache = (memory[:, i].transpose(1, 2) for i in (0, 1))


def test_caches_of_an_engine_are_read_without_a_copy() -> None:
    plain = Scenario([3, 1], [20, 33], head_size=64, dtype=torch.bfloat16)
    engine = Scenario([3, 1], [20, 33], head_size=64, dtype=torch.bfloat16)
    engine_caches(engine)
    assert not engine.key_cache.transpose(1, 2).is_contiguous()
    with Calls() as calls:
        output = run_draft(engine)
    (call,) = [args for name, args in calls.made if name == "flash_attn"]
    assert call.layout_kv == "PA_BBND"
    assert call.k.data_ptr() == engine.key_cache.data_ptr()
    assert ascend_attn_ops.check("flash_attn", call, profile_for("A5")) == []
    assert torch.equal(output, run_draft(plain))


def test_head_major_caches_have_a_layout_of_their_own() -> None:
    scenario = Scenario([3, 1], [20, 33], head_size=64, dtype=torch.bfloat16, token_major=False)
    with Calls() as calls:
        scenario.compare(run_draft(scenario))
    (call,) = [args for name, args in calls.made if name == "flash_attn"]
    assert call.layout_kv == "PA_BNBD"
    assert ascend_attn_ops.check("flash_attn", call, profile_for("A5")) == []


def test_control_memory_that_the_operator_does_not_take_is_refused() -> None:
    scenario = Scenario([3, 1], [20, 33], head_size=64, dtype=torch.bfloat16)
    odd = scenario.key_cache.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    scenario.key_cache = odd
    found = refusals(scenario)
    assert "flash_attn.kv_strides" in {entry.rule for entry in found}


@pytest.mark.parametrize("family", ["A2", "A3", "310P"])
def test_control_other_products_refuse_the_call(family: str) -> None:
    scenario = Scenario([3, 1], [20, 33], head_size=64, dtype=torch.bfloat16)
    with (
        ascend_attn_ops.use_profile(profile_for(family)),
        pytest.raises(ascend_attn_ops.OpArgumentError, match="profile: found"),
    ):
        run_draft(scenario)
