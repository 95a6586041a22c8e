"""What the builder may touch, and how little a layer does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import attrs
import pytest
import torch
from attn_backends_support import Scenario, steps
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_attn_backends import (
    AscendAttentionMetadataBuilder,
    AscendMetadata,
    AttentionBatch,
    AttentionMaskBuilder,
)


class Recorder(TorchDispatchMode):
    """Names of the operators that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("causal", [True, [True, False, True]])
def test_no_device_tensor_is_read_when_host_copies_are_given(causal: bool | list[bool]) -> None:
    """Tensors on the meta device have no values: reading one raises."""
    batch = AttentionBatch.from_lengths([4, 1, 3], [20, 9, 33], 16, causal=causal, device="meta")
    metadata = AscendAttentionMetadataBuilder(16, masks=AttentionMaskBuilder()).build(batch)
    on_host = AttentionBatch.from_lengths([4, 1, 3], [20, 9, 33], 16, causal=causal)
    expected = AscendAttentionMetadataBuilder(16).build(on_host)
    assert metadata.num_tokens == 8
    for call, wanted in zip(metadata.launches, expected.launches, strict=True):
        assert call.block_table.device.type == "meta"
        assert call.query_lens_cumulative == wanted.query_lens_cumulative
        assert call.seq_lens == wanted.seq_lens


@pytest.mark.parametrize("field", ["query_start_loc_cpu", "seq_lens_cpu", "causal_cpu"])
def test_control_without_a_host_copy_the_device_is_read(field: str) -> None:
    batch = AttentionBatch.from_lengths([4, 1], [20, 9], 16, causal=[True, False], device="meta")
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        AscendAttentionMetadataBuilder(16).build(attrs.evolve(batch, **{field: None}))


def test_without_host_copies_the_result_is_the_same() -> None:
    scenario = Scenario([4, 1], [20, 9], causal=[True, False])
    batch = attrs.evolve(
        scenario.batch(), query_start_loc_cpu=None, seq_lens_cpu=None, causal_cpu=None
    )
    scenario.compare(scenario.run(batch))


def test_block_table_is_cut_to_what_the_step_reads() -> None:
    batch = AttentionBatch.from_lengths([1, 1], [33, 16], 16)
    wide = attrs.evolve(batch, block_table=torch.zeros(2, 500, dtype=torch.int32))
    assert AscendAttentionMetadataBuilder(16).build(wide).launches[0].block_table.shape == (2, 3)


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"block_size.*>= 1: 0"):
        AscendAttentionMetadataBuilder(0)


def layer_operators(count: int) -> list[str]:
    scenario = Scenario([2] * count, [18] * count)
    scenario.run()
    metadata, impl = scenario.build(), scenario.impl()
    output = torch.empty_like(scenario.query)
    with Recorder() as recorder:
        impl.forward(scenario.query, scenario.key_cache, scenario.value_cache, metadata, output)
    return recorder.names


def test_a_layer_only_calls_the_operator_and_copies_its_result() -> None:
    names = layer_operators(2)
    calls = [name for name in names if name.startswith("ascend_attn")]
    assert calls == ["ascend_attn.fused_infer_attention_score.default"]
    views = {"aten.transpose.int", "aten.view.default", "aten.slice.Tensor", "aten.flatten"}
    rest = [name for name in names if name not in views and name not in calls]
    assert rest == ["aten.copy_.default"]


def test_work_per_layer_does_not_grow_with_requests() -> None:
    assert layer_operators(1) == layer_operators(64)


def snapshot(metadata: AscendMetadata) -> list[Any]:
    calls = [
        (call.causal, call.query_lens_cumulative, call.seq_lens, call.block_table.tolist())
        for call in metadata.launches
    ]
    return [metadata.num_tokens, metadata.slot_mapping.tolist(), calls]


@given(st.lists(steps(max_reqs=4), min_size=2, max_size=5), st.booleans())
def test_building_all_steps_then_reading_one_equals_building_that_one(
    schedule: list[tuple[list[int], list[int]]], share: bool
) -> None:
    """All steps go through one set of buffers; each is refilled in place for the next step."""
    builder = AscendAttentionMetadataBuilder(16)
    buffers = AttentionBatch.from_lengths([9] * 4, [64] * 4, 16)

    def through_buffers(step: tuple[list[int], list[int]]) -> AttentionBatch:
        batch = AttentionBatch.from_lengths(*step, 16)
        changes = {}
        for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table"):
            value = getattr(batch, name)
            view = getattr(buffers, name)[tuple(slice(0, size) for size in value.shape)]
            changes[name] = view.copy_(value)
            if share and hasattr(batch, f"{name}_cpu"):
                changes[f"{name}_cpu"] = view
        return attrs.evolve(batch, **changes)

    built = [builder.build(through_buffers(step)) for step in schedule]
    for step, metadata in zip(schedule, built, strict=True):
        alone = builder.build(AttentionBatch.from_lengths(*step, 16))
        assert snapshot(metadata) == snapshot(alone)


def test_importing_brings_no_other_layer_and_touches_no_device() -> None:
    code = (
        "import sys, ascend_attn_backends\n"
        "found = {'vllm', 'anyio', 'torch_npu', 'transformers', 'ascend_specdecode',\n"
        "         'ascend_vllm_plugin'} & set(sys.modules)\n"
        "assert not found, found\n"
        "from ascend_attn_backends.masks import SHARED_MASKS\n"
        "assert not SHARED_MASKS._templates\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
