"""Devices, memory, streams, events and counters of the emulated runtime, through torch.npu."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ascend_attn_ops as ops
from ascend_attn_ops.emulator import AlreadyActiveError, Emulator, activate, current, kernel


def test_the_device_is_the_soc_that_was_asked_for(npu: Emulator) -> None:
    import torch_npu

    profile = npu.profile
    properties = torch.npu.get_device_properties(0)
    assert torch.npu.get_device_name() == profile.soc_name
    assert torch_npu.npu.get_soc_version() == profile.runtime_value
    assert properties.cube_core_num == profile.cube_cores
    assert properties.vector_core_num == profile.vector_cores
    assert properties.total_memory == npu.options["memory_bytes"]
    assert properties.total_memory in (profile.memory_bytes, 64 << 30)
    assert torch.npu.is_bf16_supported()
    assert current() is npu


def test_another_device_in_the_same_process_is_refused(npu: Emulator) -> None:
    other = "A5" if npu.profile.family.value == "A3" else "A3"
    with pytest.raises(AlreadyActiveError, match=npu.profile.soc_name):
        activate(other)
    assert activate(soc=npu.profile.soc_name) is npu


def test_as_a_context_it_judges_for_the_emulated_soc(npu: Emulator) -> None:
    assert ops.current_profile() is None
    with npu, npu:
        assert ops.current_profile() == npu.profile
    assert ops.current_profile() is None


def test_copies_are_counted_by_direction(npu: Emulator) -> None:
    host = torch.arange(6, dtype=torch.float32)
    with npu.record() as seen:
        device = host.npu()
    assert seen.counters.host_to_device_copies == 1
    assert seen.counters.host_to_device_bytes == 24
    assert seen.counters.device_to_host_copies == 0
    with npu.record() as seen:
        assert torch.equal(device.cpu(), host)
    assert (seen.counters.device_to_host_copies, seen.counters.device_to_host_bytes) == (1, 24)
    assert seen.counters.synchronisations >= 1
    with npu.record() as seen:
        device.clone()
    assert seen.counters.device_to_host_copies == seen.counters.synchronisations == 0


def test_item_costs_a_copy_and_a_synchronisation(npu: Emulator) -> None:
    total = torch.ones(3, device="npu").sum()
    with npu.record() as seen:
        assert total.item() == 3.0
    assert seen.counters.device_to_host_copies == 1
    assert seen.counters.synchronisations == 1


def test_elementwise_work_needs_neither(npu: Emulator) -> None:
    x = torch.ones(3, device="npu")
    with npu.record() as seen:
        y = (x + 1).cumsum(0).clamp(max=5)
    assert seen.operators == ["aclnnAdds", "aclnnCumsum", "aclnnClamp"]
    assert seen.counters.launches == 3
    assert seen.counters.device_to_host_copies == seen.counters.synchronisations == 0
    assert y.tolist() == [2.0, 4.0, 5.0]


def test_memory_runs_out_where_it_ends(npu: Emulator) -> None:
    free, total = torch.npu.mem_get_info()
    assert free <= total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="npu")
    npu.set_memory(total // 2)
    try:
        assert torch.npu.mem_get_info()[1] == total // 2
    finally:
        npu.set_memory(total)


def test_memory_comes_back(npu: Emulator) -> None:
    torch.npu.empty_cache()
    before = npu.live["device_bytes"]
    block = torch.empty(32 << 20, dtype=torch.uint8, device="npu")
    assert npu.live["device_bytes"] - before >= 32 << 20
    assert torch.npu.memory_allocated() >= 32 << 20
    del block
    torch.npu.empty_cache()
    assert npu.live["device_bytes"] == before


def test_new_memory_is_not_a_number(npu: Emulator) -> None:
    torch.npu.empty_cache()
    block = torch.empty(4 << 20, dtype=torch.float16, device="npu")  # too large for a used segment
    assert block.isnan().all().item()


def test_streams_and_events(npu: Emulator) -> None:
    stream = torch.npu.Stream()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    with torch.npu.stream(stream):
        start.record()
        x = torch.ones(4, device="npu") * 2
        end.record()
    torch.npu.current_stream().wait_stream(stream)
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert x.tolist() == [2.0] * 4
    with npu.record() as seen:
        torch.npu.synchronize()
    assert seen.counters.device_synchronisations == 1


def test_pinned_memory_and_asynchronous_copies(npu: Emulator) -> None:
    pinned = torch.arange(4.0).pin_memory()
    assert pinned.is_pinned()
    with npu.record() as seen:
        device = pinned.to("npu", non_blocking=True)
    assert seen.counters.host_to_device_copies == 1
    assert seen.counters.synchronisations == 0
    assert device.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_operator_that_is_not_emulated_is_named(npu: Emulator) -> None:
    with npu.record() as seen, pytest.raises(RuntimeError, match="aclnnHardswish is not emulated"):
        torch.nn.functional.hardswish(torch.ones(3, device="npu"))
    assert seen.calls[-1].operator == "aclnnHardswish"
    assert seen.calls[-1].refused == "not emulated"


def test_an_operator_can_be_added(npu: Emulator) -> None:
    x = torch.tensor([-1.0, 0.1, 2.0], device="npu")
    with pytest.raises(RuntimeError, match="aclnnHardshrink is not emulated"):
        torch.nn.functional.hardshrink(x, 0.5)

    @kernel("aclnnHardshrink", arguments="self, scalar lambd -> out")
    def hardshrink(a: Any) -> torch.Tensor:
        return torch.nn.functional.hardshrink(a.self, a.lambd)

    with npu.record() as seen:
        assert torch.nn.functional.hardshrink(x, 0.5).tolist() == [-1.0, 0.0, 2.0]
    assert seen.of("aclnnHardshrink")[0].described() == {
        "self": "float32[3]", "lambd": 0.5, "out": "float32[3]",
    }  # fmt: skip


def test_a_mistake_of_an_operator_carries_its_reason(npu: Emulator) -> None:
    x = torch.ones(2, 3, device="npu")
    with pytest.raises(RuntimeError, match="IndexError: index out of range"):
        x.index_select(0, torch.tensor([7], device="npu"))


def test_a_call_is_described_with_dtypes_shapes_and_numbers(npu: Emulator) -> None:
    a, b = torch.ones(2, 3, device="npu").half(), torch.ones(3, 4, device="npu").half()
    with npu.record() as seen:
        a @ b
    (call,) = seen.of("aclnnMatmul")
    wanted = {"self": "float16[2, 3]", "mat2": "float16[3, 4]", "out": "float16[2, 4]"}
    assert call.described() == {**wanted, "cube_math_type": 0}
    assert str(call).startswith("aclnnMatmul(self=float16[2, 3], ")


def test_without_kernels_calls_are_checked_but_not_computed(npu: Emulator) -> None:
    target = torch.zeros(3, device="npu")
    with npu.without_kernels(), npu.record() as seen:
        target += 1
    assert seen.operators == ["aclnnInplaceAdds"]
    assert target.tolist() == [0.0] * 3
    target += 1
    assert target.tolist() == [1.0] * 3
