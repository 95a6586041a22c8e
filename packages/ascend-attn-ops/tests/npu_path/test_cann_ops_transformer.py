"""flash_attn and its plan: our provider -> the vendor's torch schema -> aclnn, emulated A5.

``cann_ops_transformer`` is built with CANN and is on no public registry; the emulator provides a
stand-in with the schemas that the real one registers.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from flash_attn_problems import Problem, arguments_of, expected, tensors_of
from npu_path.expected_calls import described
from npu_path.support import on_npu

import ascend_attn_ops as ops
from ascend_attn_ops import emulator
from ascend_attn_ops.aclnn_abi import signature
from ascend_attn_ops.arguments import parameters
from ascend_attn_ops.emulator import Emulator

SCHEMAS = Path(__file__).parents[1] / "data" / "cann_ops_transformer_schemas.json"
BASE = Problem(
    layout_q="TND", layout_kv="PA_BBND", layout_out="TND", q_rooms=[3, 0, 5], kv_rooms=[40, 20, 7],
    q_used=None, kv_used=[33, 20, 4], group=2, kv_heads=2, size=64, block_size=16, mode=3,
    left=-1, right=-1, sinks=False, strided=False, seed=4,
)  # fmt: skip
PROBLEMS = {
    "paged_causal": BASE,
    "paged_window": attrs.evolve(BASE, mode=4, left=6, right=0, layout_kv="PA_BNBD"),
    "paged_nz_in_use": attrs.evolve(BASE, layout_kv="PA_NZ", q_used=[2, 0, 5], mode=0),
    "packed": attrs.evolve(BASE, layout_kv="TND", kv_used=None),
    "dense_to_other_layout": attrs.evolve(
        BASE, layout_q="BNSD", layout_kv="BNSD", layout_out="BSND", q_rooms=[4] * 3,
        kv_rooms=[9] * 3, kv_used=[0, 9, 3],
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def vendor(npu: Emulator, family: str) -> Any:
    if family != "A5":
        pytest.skip("flash_attn exists on A5 only; its refusal is tested with every operator")
    emulator.provide_cann_ops_transformer()
    return importlib.import_module("cann_ops_transformer.ops")


def arguments(problem: Problem) -> dict[str, Any]:
    return on_npu(arguments_of(problem, tensors_of(problem, torch.bfloat16)))


def planned(call: dict[str, Any], npu: Emulator) -> dict[str, Any]:
    with ops.use_profile(npu.profile):
        plan = ops.FlashAttnPlan.build(ops.flash_attn.bind(**call).plan_arguments())
    return {**call, "metadata": plan.metadata}


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found.cpu().double(), wanted, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_and_calls(name: str, npu: Emulator) -> None:
    problem = PROBLEMS[name]
    call = arguments(problem)
    with npu.record() as seen:
        call = planned(call, npu)
        out, lse = ops.flash_attn(**call, profile=npu.profile)
    wanted_out, wanted_lse = expected(problem, tensors_of(problem, torch.bfloat16))
    assert close(out, wanted_out)
    assert close(lse, wanted_lse)
    other = expected(problem, tensors_of(attrs.evolve(problem, seed=9), torch.bfloat16))
    assert not close(out, other[0])
    plan_call, attention_call = (c for c in seen.calls if c.operator.startswith("aclnnFlashAttn"))
    assert plan_call.operator == "aclnnFlashAttnMetadata"
    plan_arguments = ops.flash_attn.bind(**call).plan_arguments()
    assert_arguments(plan_call, plan_arguments, {"metadata": described(call["metadata"])})
    outputs = {"attn_out": described(out), "softmax_lse": described(lse)}
    assert_arguments(attention_call, ops.flash_attn.bind(**call), outputs)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("where", ["npu", "cpu"])
def test_without_the_package_by_aclnn(name: str, where: str, npu: Emulator) -> None:
    """The provider aclnn: plan and attention by two-stage calls, of NPU tensors and of CPU ones."""
    problem = PROBLEMS[name]
    tensors = tensors_of(problem, torch.bfloat16)
    call = arguments_of(problem, tensors)
    call = on_npu(call) if where == "npu" else call
    with npu.record() as seen, ops.use_provider("aclnn"):
        call = planned(call, npu)
        out, lse = ops.flash_attn(**call, profile=npu.profile)
    assert out.device.type == lse.device.type == where
    wanted_out, wanted_lse = expected(problem, tensors)
    assert close(out, wanted_out)
    assert close(lse, wanted_lse)
    other = expected(problem, tensors_of(attrs.evolve(problem, seed=9), torch.bfloat16))
    assert not close(out, other[0])
    own = [c for c in seen.calls if c.operator.startswith("aclnnFlashAttn")]
    assert [c.operator for c in own] == ["aclnnFlashAttnMetadata", "aclnnFlashAttn"]
    assert not any("cann_ops_transformer" in c.operator for c in seen.calls)
    plan_arguments = ops.flash_attn.bind(**call).plan_arguments()
    assert_arguments(own[0], plan_arguments, {"metadata": described(call["metadata"])})


def test_a_plan_of_numbers_alone_by_aclnn(npu: Emulator) -> None:
    """No tensor says where: absent numbers and layouts become what CANN reads for None."""
    with npu.record() as seen:
        plan = ops.flash_attn_metadata(
            4, 2, 64, batch_size=3, max_seqlen_q=2, max_seqlen_kv=9, mask_mode=0,
            provider="aclnn", profile=npu.profile,
        )  # fmt: skip
    assert plan.device.type == "cpu"
    assert plan[3 + 16] == 3 * 2  # all heads, as the emulated plan says it
    (call,) = seen.calls
    given = {"win_left": -1, "layout_q": "BSND", "batch_size": 3, "seqused_q": None}
    assert call.described().items() >= given.items()


def assert_arguments(call: Any, record: Any, outputs: dict[str, Any]) -> None:
    """Every C argument, in order, is what the call record says."""
    names = [parameter.name for parameter in signature(call.operator).parameters]
    given = {p.name: described(getattr(record, p.name)) for p in parameters(type(record))}
    assert call.described() == {name: outputs.get(name, given.get(name)) for name in names}


def test_no_host_copy_and_no_waiting(npu: Emulator) -> None:
    call = arguments(BASE)
    with npu.record() as seen:
        call = planned(call, npu)
        ops.flash_attn(**call, profile=npu.profile)
    assert seen.counters.device_to_host_copies == 0
    assert seen.counters.synchronisations == 0


def test_the_stand_in_has_the_recorded_schemas(vendor: Any) -> None:
    recorded = json.loads(SCHEMAS.read_text())["schemas"]
    for text in recorded:
        wanted = torch._C.parse_schema(text)
        found = getattr(torch.ops.cann_ops_transformer, wanted.name).default._schema
        shape = [(a.name, str(a.type), a.default_value, a.kwarg_only) for a in wanted.arguments]
        ours = [(a.name, str(a.type), a.default_value, a.kwarg_only) for a in found.arguments]
        assert ours == shape
        assert [str(r.type) for r in found.returns] == [str(r.type) for r in wanted.returns]
        assert hasattr(vendor, wanted.name)


def test_a_wrong_order_is_refused(vendor: Any, npu: Emulator) -> None:
    """Control: the order that the vendor's documents print, in place of the registered one."""
    call = planned(arguments(BASE), npu)
    tensors = [
        call["q"], call["k"], call["v"], call["block_table"], call["cu_seqlens_q"], None, None,
        call["seqused_kv"], None,
    ]  # fmt: skip
    with pytest.raises((RuntimeError, TypeError), match=r"flash_attn\(\)"):
        vendor.flash_attn(*tensors, call["metadata"], 0.3, 3, call["attn_mask"], -1, -1)
    right = vendor.flash_attn(
        *tensors, call["attn_mask"], call["metadata"], 0.3, 3, layout_q="TND",
        layout_kv="PA_BBND", layout_out="TND",
    )  # fmt: skip
    assert close(right[0], expected(BASE, tensors_of(BASE, torch.bfloat16))[0])
    assert right[1].shape == (0,)
    with pytest.raises(RuntimeError, match="mask_mode"):  # an explicit None becomes 1
        vendor.flash_attn_metadata(
            4, 2, 64, seqused_kv=call["seqused_kv"], cu_seqlens_q=call["cu_seqlens_q"],
            max_seqlen_q=5, max_seqlen_kv=33, layout_q="TND", layout_kv="PA_BBND",
            layout_out="TND",
        )  # fmt: skip


def test_a_plan_of_another_batch_is_noticed(npu: Emulator) -> None:
    """CANN does not check that: a plan for two requests leads the kernel of three astray."""
    call = arguments(BASE)
    small = attrs.evolve(BASE, q_rooms=[3, 5], kv_rooms=[40, 7], kv_used=[33, 4])
    plan = planned(arguments(small), npu)["metadata"]
    with pytest.raises(RuntimeError, match="a plan of 4 heads, not 6"):
        ops.flash_attn(**{**call, "metadata": plan}, profile=npu.profile)
    unwritten = torch.full_like(plan, -1)
    with pytest.raises(RuntimeError, match="a plan of 0 heads"):
        ops.flash_attn(**{**call, "metadata": unwritten}, profile=npu.profile)


def test_fake_kernels_agree(vendor: Any, npu: Emulator) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = planned({**arguments(BASE), "return_softmax_lse": True}, npu)
    real = vendor.flash_attn(**{n: v for n, v in call.items() if v is not None})
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in call.items()
        }
        fake = vendor.flash_attn(**{n: v for n, v in fakes.items() if v is not None})
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]
