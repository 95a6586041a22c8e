"""Every operator through its torch_npu provider: results, refusals and the aclnn call that is made.

The emulated operators compute in float64, apart from the providers; the results are compared with
the reference provider on the CPU, which is another implementation, in the vendor's tolerance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from npu_path.cases import CASES
from npu_path.expected_calls import NAMES, ON_A5, expected_call, expected_operator
from npu_path.support import Case, copied, differences, on_npu, results, tolerance

import ascend_attn_ops as ops
from ascend_attn_ops.emulator import Call, Emulator, emulated_profile
from ascend_attn_ops.emulator.dispatch import load_kernels

IDS = [f"{case.op}-{case.name}" for case in CASES]
SERVED = {name for name, _ in NAMES.values()} | {
    "aclnnSparseFlashAttentionV2",
    *ON_A5.values(),
}  # not the copies and small steps around them


@pytest.fixture(autouse=True)
def private_formats(npu: Emulator) -> None:
    import torch_npu

    torch_npu.npu.config.allow_internal_format = True


def skip_illegal(case: Case, npu: Emulator) -> None:
    family = npu.profile.family.value
    if family not in case.families:
        pytest.skip(f"{case.op} {case.name}: legal on {', '.join(case.families)} only")


def supported(case: Case, npu: Emulator) -> bool:
    return npu.profile.operator(case.op).supported is not False


def recorded_run(case: Case, npu: Emulator) -> tuple[dict[str, torch.Tensor], list[Call]]:
    """Results through the provider that is chosen for NPU tensors, and its aclnn calls."""
    arguments = case.before(on_npu(case.arguments()))
    with npu.record() as seen:
        found = results(case.operator, arguments, profile=npu.profile)
    return specified(case, found), [call for call in seen.calls if call.operator in SERVED]


def reference(case: Case, npu: Emulator, arguments: Any) -> dict[str, torch.Tensor]:
    options = {"provider": "reference", "profile": npu.profile}
    return specified(case, results(case.operator, copied(arguments), **options))


def specified(case: Case, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in found.items() if name not in case.unspecified}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_results_and_call(case: Case, npu: Emulator) -> None:
    skip_illegal(case, npu)
    if not supported(case, npu):
        pytest.skip(f"{npu.profile.soc_name} has no {case.op}: the refusal is tested below")
    explanation = ops.explain(case.op, case.operator.bind(**on_npu(case.arguments())), npu.profile)
    assert explanation.chosen == "torch_npu", explanation
    found, calls = recorded_run(case, npu)
    wanted = reference(case, npu, case.arguments())
    assert differences(found, wanted, tolerance(case)) == []
    (call,) = calls
    assert (call.operator, call.described()) == expected_call(case, npu.profile)
    noticed = reference(case, npu, case.control(case.arguments()))
    assert differences(found, noticed, tolerance(case)), "the control was not noticed"


def test_unsupported_operators_are_refused_by_us_and_by_torch_npu(npu: Emulator) -> None:
    refused = [case for case in CASES if not supported(case, npu)]
    if not refused:
        pytest.skip(f"{npu.profile.soc_name} supports every operator with a torch_npu provider")
    for case in refused:
        with pytest.raises(ops.OpArgumentError) as caught:
            recorded_run(case, npu)
        (refusal,) = caught.value.refusals
        assert npu.profile.soc_name in refusal.found
        record = case.operator.bind(**case.before(on_npu(case.arguments())))
        with pytest.raises(RuntimeError, match="not support on this soc"):
            case.operator.providers["torch_npu"].run(record)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_sanitizer_reads_npu_tensors(case: Case, npu: Emulator) -> None:
    """Legal values pass, with every value rule asked; none mixes host and device."""
    skip_illegal(case, npu)
    arguments = case.before(on_npu(case.arguments()))
    record = case.operator.bind(**arguments)
    assert case.operator.contract.broken_values(record, npu.profile) == []


def test_the_sanitizer_names_a_bad_value_of_an_npu_tensor(npu: Emulator) -> None:
    case = next(case for case in CASES if case.op == "sparse_flash_attention")
    arguments = on_npu(case.arguments())
    arguments["block_table"][1, 1] = 99
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=r"block_table.*99"):
        results(case.operator, arguments, profile=npu.profile)


def test_every_torch_npu_provider_has_a_case() -> None:
    providers = {op.name for op in ops.all_operators() if "torch_npu" in op.providers}
    assert providers == {case.op for case in CASES}


# Emulated attention operators that no case reaches, and where they are compared instead.
ELSEWHERE = {
    "aclnnFlashAttn": "test_cann_ops_transformer.py",
    "aclnnFlashAttnMetadata": "test_cann_ops_transformer.py",
    "aclnnFlashAttentionScore": "test_basic_operators.py, as torch's attention",
    "aclnnFlashAttentionScoreV4": "test_basic_operators.py, as torch's attention on A5",
    "aclnnKvRmsNormRopeCacheV2": "the kernel of version 1; its new argument is refused",
    "aclnnRotaryPositionEmbedding": "the kernel of version 2, of which torch_npu calls the latter",
}
BASIC_KERNELS = ("elementwise", "indexing", "linear", "random_numbers", "reductions")


def test_every_emulated_attention_operator_is_compared_and_controlled(npu: Emulator) -> None:
    """On each product that has it: a case is a comparison and a control."""
    kernels = {name: entry.kernel for name, entry in load_kernels().items()}
    attention = {
        name
        for name, function in kernels.items()
        if function.__module__.startswith("ascend_attn_ops.")
        and function.__module__.rpartition(".")[2] not in BASIC_KERNELS
    }
    # Which version is called depends on the operator, the product and the sinks alone.
    kinds = {(case.op, case.name == "sinks"): case for case in CASES}
    reached = {
        expected_operator(case.op, case.arguments(), profile)
        for case in kinds.values()
        for profile in map(emulated_profile, case.families)
        if profile.operator(case.op).supported is not False
    }
    assert attention - reached == set(ELSEWHERE)
    assert {name for name in reached if name.startswith("aclnn")} <= attention
    for older, newer in (
        ("aclnnKvRmsNormRopeCacheV2", "aclnnKvRmsNormRopeCache"),
        ("aclnnRotaryPositionEmbedding", "aclnnRotaryPositionEmbeddingV2"),
    ):
        assert kernels[older] is kernels[newer]
