"""Plans and the call they belong to: the sanitizer, and the record that the plan cache keeps."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from flash_attn_problems import Problem, arguments_of, ints, tensors_of

import ascend_attn_ops as ops
from ascend_hwprofile import profile_for


def call(**changes: Any) -> dict[str, Any]:
    p = Problem(
        "TND", "PA_BBND", "TND", [3, 0, 5], [48] * 3, None, [20, 7, 40], 2, 2, 64, 16, 3, -1, -1,
        sinks=False, strided=False, seed=5,
    )  # fmt: skip
    return arguments_of(p, tensors_of(p, torch.float32)) | changes


def plan_for(arguments: dict[str, Any]) -> torch.Tensor:
    wanted = ops.flash_attn.bind(**arguments).plan_arguments()
    return ops.flash_attn_metadata(
        **{field.name: getattr(wanted, field.name) for field in attrs.fields(type(wanted))}
    )


@pytest.mark.parametrize("provider", ["reference", "cpu"])
def test_sanitizer_accepts_the_plan_of_the_call(provider: str) -> None:
    arguments = call()
    plan = plan_for(arguments)
    with ops.sanitize():
        out, _ = ops.flash_attn(**arguments, metadata=plan, provider=provider)
    assert torch.equal(out, ops.flash_attn(**arguments, provider=provider)[0])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seqused_kv": ints([20, 7, 600]), "max_seqlen_kv": 600}, r"word \d+ is"),
        ({"max_seqlen_q": -1}, "word 2 is"),
        (
            {"cu_seqlens_q": ints([0, 8]), "seqused_kv": ints([9]), "max_seqlen_q": 8},
            "this call's plan has",
        ),
    ],
)
def test_sanitizer_names_a_plan_for_other_arguments(changes: dict[str, Any], text: str) -> None:
    arguments = call(seqused_kv=ints([20, 7, 300]), max_seqlen_kv=300)
    arguments["block_table"] = torch.zeros(3, 40, dtype=torch.int32)
    arguments["k"] = arguments["v"] = torch.randn(1, 16, 20, 64)
    arguments["q"] = torch.randn(8, 20, 64)
    ops.flash_attn(**arguments, metadata=plan_for(arguments | changes))
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.flash_attn(**arguments, metadata=plan_for(arguments | changes))


def test_sanitizer_names_a_plan_for_another_chip() -> None:
    arguments = call(cu_seqlens_q=ints([0, 8]), max_seqlen_q=8, seqused_kv=ints([20]))
    arguments["block_table"] = arguments["block_table"][:1]
    with ops.use_profile("Ascend950DT_9572"):
        plan = plan_for(arguments)
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=r"word 4 is 28.* has 36"):
        ops.flash_attn(**arguments, metadata=plan)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cu_seqlens_q": ints([0, 3, 2, 8])}, r"cu_seqlens_q\[2\] = 2 after 3"),
        ({"cu_seqlens_q": ints([1, 3, 3, 8])}, r"cu_seqlens_q\[0\] = 1, not 0"),
        ({"cu_seqlens_q": ints([0, 3, 3, 7])}, r"cu_seqlens_q\[3\] = 7, but there are 8"),
        ({"seqused_q": ints([4, 0, 5])}, r"seqused_q\[0\] = 4, room for 3"),
        ({"seqused_kv": ints([20, -1, 40])}, r"seqused_kv\[1\] = -1"),
        ({"seqused_kv": ints([20, 7, 65])}, r"seqused_kv\[2\] = 65, room for 64"),
        ({"max_seqlen_q": 4}, "max_seqlen_q 4, longest 5"),
        ({"max_seqlen_kv": 39}, "max_seqlen_kv 39, longest 40"),
        ({"attn_mask": torch.ones(2048, 2048, dtype=torch.int8).triu()}, r"1 at \[0, 0\]"),
    ],
)
def test_sanitizer_names_the_bad_value(changes: dict[str, Any], text: str) -> None:
    arguments = call()
    with ops.sanitize():
        ops.flash_attn(**arguments)
        with pytest.raises(ops.SanitizerError, match=text):
            ops.flash_attn(**arguments | changes)


def test_sanitizer_names_the_block_that_does_not_exist() -> None:
    arguments = call()
    arguments["block_table"][2, 1] = 999
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=r"block_table\[2, 1\] = 999"):
        ops.flash_attn(**arguments)


def test_a_plan_fits_its_own_call_and_equal_lengths() -> None:
    arguments = call()
    bound = ops.flash_attn.bind(**arguments)
    plan = ops.FlashAttnPlan.build(bound)
    assert torch.equal(plan.metadata, plan_for(arguments))
    assert plan.fits(bound) == []
    assert plan.fits(attrs.evolve(bound, metadata=plan.metadata, softmax_scale=2.0)) == []
    assert plan.fits(attrs.evolve(bound, seqused_kv=ints([20, 7, 40]))) == []


@pytest.mark.parametrize(
    ("changes", "parameter", "found"),
    [
        ({"mask_mode": 4}, "mask_mode", "4"),
        ({"mask_mode": 4, "win_left": 9}, "windows", "(9, -1)"),
        ({"max_seqlen_kv": 41}, "longest", "(5, 41)"),
        ({"layout_kv": "PA_BNBD"}, "layouts", "('TND', 'PA_BNBD', 'TND')"),
        ({"q": torch.randn(8, 8, 64)}, "num_heads_q", "8"),
        ({"seqused_kv": ints([20, 7, 41])}, "seqused_kv", "[20, 7, 41]"),
        ({"seqused_kv": None}, "seqused_kv", "nothing"),
        ({"seqused_q": ints([1, 0, 5])}, "seqused_q", "a tensor [3]"),
        ({"metadata": torch.zeros(4096, dtype=torch.int32)}, "metadata", "another tensor"),
    ],
)
def test_a_plan_says_what_does_not_fit(changes: dict[str, Any], parameter: str, found: str) -> None:
    bound = ops.flash_attn.bind(**call())
    plan = ops.FlashAttnPlan.build(bound)
    refusals = plan.fits(attrs.evolve(bound, **changes))
    (refusal,) = (refusal for refusal in refusals if refusal.parameter == parameter)
    assert refusal.found == found
    assert refusal.rule == "flash_attn.plan"


def test_a_plan_notices_lengths_changed_in_place() -> None:
    bound = ops.flash_attn.bind(**call())
    plan = ops.FlashAttnPlan.build(bound)
    assert bound.seqused_kv is not None
    bound.seqused_kv[0] += 1
    (refusal,) = plan.fits(bound)
    assert (refusal.parameter, refusal.found) == ("seqused_kv", "[21, 7, 40]")
    assert refusal.allowed.startswith("[20, 7, 40]")


def test_device_lengths_are_known_by_identity_and_version() -> None:
    """The meta device stands for one whose values must not be read."""
    from ascend_attn_ops.operators.flash_attn.plan import _Snapshot

    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    seen = _Snapshot.of(lengths)
    assert seen is not None
    assert seen.values is None
    assert seen.difference(lengths) is None
    lengths.add_(1)
    assert seen.difference(lengths) == "the same tensor, written to since"
    assert seen.difference(torch.empty(4, dtype=torch.int32, device="meta")) is not None


def test_a_plan_is_made_for_the_chip_it_is_asked_for() -> None:
    bound = ops.flash_attn.bind(**call())
    plan = ops.FlashAttnPlan.build(bound, profile=profile_for("Ascend950DT_9572"))
    assert plan.metadata[4:6].tolist() == [28, 56]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        plan.metadata = plan.metadata  # type: ignore[misc]


def test_an_impossible_plan_is_refused() -> None:
    bound = ops.flash_attn.bind(**call(cu_seqlens_q=ints([0, 3, 2, 8])))
    with pytest.raises(ops.OpArgumentError, match=r"cu_seqlens_q\[2\] = 2 after 3"):
        ops.FlashAttnPlan.build(bound)
    with pytest.raises(ops.OpArgumentError, match="layout_kv: found 'PA_XYZ'"):
        ops.FlashAttnPlan.build(attrs.evolve(bound, layout_kv="PA_XYZ"))
