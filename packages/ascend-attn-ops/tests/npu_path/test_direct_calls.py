"""The aclnn provider and direct two-stage calls: results, typed errors, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from npu_path import direct
from npu_path.cases import CASES
from npu_path.expected_calls import expected_call
from npu_path.support import Case, copied, differences, on_npu, results, tolerance
from npu_path.test_processes import clean_environment

import ascend_attn_ops as ops
from ascend_attn_ops.emulator import Emulator
from ascend_attn_ops.providers import aclnn

SERVED = [case for case in CASES if "aclnn" in case.operator.providers]
PROGRAM = Path(__file__).parent / "without_torch_npu.py"
SPARSE = direct.OPERATOR


@pytest.fixture
def runtime(npu: Emulator) -> Iterator[aclnn.Runtime]:
    """A runtime; when it is closed nothing of it is alive, by its own count and the emulator's."""
    before = npu.live
    runtime = aclnn.Runtime()
    yield runtime
    runtime.close()
    assert runtime.counters.live_handles == {}
    assert (runtime.counters.live_bytes, runtime.counters.live_allocations) == (0, 0)
    assert npu.live == before


@pytest.fixture
def call(runtime: aclnn.Runtime) -> Iterator[dict[str, Any]]:
    arguments = direct.arguments(runtime, direct.host_inputs())
    yield arguments
    direct.free(arguments)


def attend(runtime: aclnn.Runtime, call: dict[str, Any]) -> torch.Tensor:
    runtime.call(SPARSE, call)
    found: torch.Tensor = call["attention_out"].torch()
    return found.double()


def legal(case: Case, npu: Emulator) -> None:
    if npu.profile.family.value not in case.families:
        pytest.skip(f"{case.op} {case.name}: legal on {', '.join(case.families)} only")
    if npu.profile.operator(case.op).supported is False:
        pytest.skip(f"{npu.profile.soc_name} has no {case.op}")


def specified(case: Case, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in found.items() if name not in case.unspecified}


def expected(case: Case, npu: Emulator) -> tuple[str, dict[str, Any]]:
    """As through torch_npu, except for what only our torch_npu provider changes."""
    operator, wanted = expected_call(case, npu.profile)
    if case.name == "paged_with_statistics":
        arguments = case.arguments()
        for name in ("query", "query_rope", "sparse_indices", "block_table"):
            wanted[name] = f"{str(arguments[name].dtype)[6:]}{list(arguments[name].shape)}"
        wanted |= {"layout_query": "TND", "actual_seq_lengths_query": "int32[2]",
                   "actual_seq_lengths_kv": "int32[2]"}  # fmt: skip
        statistic = "float32[1, 6, 8]"
        wanted |= {"attention_out": wanted["query"]}
        wanted |= {"softmax_max": statistic, "softmax_sum": statistic}
    return operator, wanted


@pytest.mark.parametrize("case", SERVED, ids=[f"{case.op}-{case.name}" for case in SERVED])
def test_results_and_call_of_the_provider(case: Case, npu: Emulator) -> None:
    legal(case, npu)
    options = {"profile": npu.profile}
    with npu.record() as seen:
        found = results(case.operator, copied(case.arguments()), provider="aclnn", **options)
    wanted = results(case.operator, copied(case.arguments()), provider="reference", **options)
    control = case.control(case.arguments())
    noticed = results(case.operator, copied(control), provider="reference", **options)
    found = specified(case, found)
    assert differences(found, specified(case, wanted), tolerance(case)) == []
    noticed = specified(case, noticed)
    assert differences(found, noticed, tolerance(case)), "the control was not noticed"
    (call,) = seen.calls
    assert (call.operator, call.described()) == expected(case, npu)


def test_npu_tensors_are_used_where_they_are(npu: Emulator) -> None:
    case = next(case for case in SERVED if case.op == "sparse_flash_attention")
    arguments = on_npu(case.arguments())
    with npu.record() as seen:
        found = case.operator(**arguments, provider="aclnn", profile=npu.profile)
    assert seen.operators == [SPARSE]
    counters = seen.counters
    assert (counters.host_to_device_copies, counters.device_to_host_copies) == (0, 0)
    assert counters.synchronisations == 0
    wanted = case.operator(**arguments, provider="torch_npu", profile=npu.profile)
    assert torch.equal(found[0].cpu(), wanted[0].cpu())


def test_a_captured_call_sees_the_tables_and_lengths_of_its_replay(npu: Emulator) -> None:
    case = next(case for case in SERVED if case.op == "sparse_flash_attention")
    given = on_npu(case.arguments())
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out, _, _ = case.operator(**given, provider="aclnn", profile=npu.profile)
    replayed = []
    for table, lengths in (([[4, 1, 6], [2, 5, 0]], [40, 23]), ([[0, 3, 5], [1, 6, 2]], [37, 30])):
        given["block_table"].copy_(torch.tensor(table, dtype=torch.int32))
        given["actual_seq_lengths_kv"].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        eager = case.operator(**given, provider="torch_npu", profile=npu.profile)[0]
        assert torch.equal(out, eager)
        replayed.append(out.cpu())
    assert not torch.equal(*replayed)


def test_a_call_against_the_formula(runtime: aclnn.Runtime, call: dict[str, Any]) -> None:
    wanted = direct.expected(direct.host_inputs())
    torch.testing.assert_close(attend(runtime, call), wanted, rtol=2**-7, atol=1e-3)
    other = direct.expected({**direct.host_inputs(), "key": direct.host_inputs(6)["key"]})
    assert not torch.allclose(attend(runtime, call), other, rtol=2**-7, atol=1e-3)


def test_without_torch_npu(npu: Emulator, family: str) -> None:
    later = ["later"] if family == "A3" else []  # torch_npu is slow to import
    command = [sys.executable, str(PROGRAM), npu.profile.soc_name, *later]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=clean_environment()
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["operators"] == [SPARSE]
    assert told["torch_npu"] is False
    assert told["error"] < 2e-2
    assert told["same"] is True
    assert set(told["live"].values()) == {0}
    assert told["family"] == family
    assert told.get("written", 128) == 128  # ATB's operators are served then, too


def test_strides_and_dtypes_of_arrays(runtime: aclnn.Runtime) -> None:
    wide = torch.arange(24, dtype=torch.float32).view(4, 6)
    views: list[Any] = [wide.t(), wide[:, 1:4], wide[1:, ::2], wide.expand(2, 4, 6)[0]]
    arrays = [wide.numpy()[::-1], wide.numpy().T, wide.numpy()[1:, 2:]]
    for view in [*views, *arrays]:
        plain = view.tolist()
        with runtime.upload(view) as source, runtime.empty(tuple(view.shape), "float32") as out:
            runtime.call("aclnnNeg", {"self": source, "out": out})
            assert out.numpy().tolist() == (-np.array(plain)).tolist()
    halves = torch.tensor([1.5, -2.0]).bfloat16()
    with runtime.upload(halves) as source:
        assert torch.equal(source.torch(), halves)
        with pytest.raises(aclnn.ArrayError, match=r"copy_to: found float32\[3\] with strides"):
            source.copy_to(torch.empty(3))


def test_tensors_in_each_others_gaps_do_not_overwrite_each_other(runtime: aclnn.Runtime) -> None:
    """Keys and values of a block in turn, as engines allocate them."""
    memory = torch.zeros(4, 2, 3)
    views = memory[:, 0], memory[:, 1]
    copies = [runtime.upload(view) for view in views]
    for number, copy in enumerate(copies, start=1):
        runtime.call("aclnnInplaceAdds", {"self_ref": copy, "other": float(number), "alpha": 1})
    for view, copy in zip(views, copies, strict=True):
        copy.copy_to(view)
    assert (memory[:, 0] == 1).all()
    assert (memory[:, 1] == 2).all()


def test_scalars_arrays_and_lists(npu: Emulator, runtime: aclnn.Runtime) -> None:
    a, b = runtime.upload(torch.ones(2, 3)), runtime.upload(torch.full((2, 3), 2.0))
    out = runtime.empty((2, 6), "float32")
    runtime.call("aclnnCat", {"tensors": [a, b], "dim": 1, "out": out})
    assert out.torch().sum(0).tolist() == [2, 2, 2, 4, 4, 4]
    runtime.call("aclnnInplaceAdds", {"self_ref": a, "other": 1.5, "alpha": 2})
    assert a.torch().tolist() == [[4.0] * 3] * 2
    total = runtime.empty((2,), "float32")
    given = {"self": b, "dims": [1], "keep_dims": False, "dtype": "float32", "out": total}
    runtime.call("aclnnReduceSum", given)
    assert total.torch().tolist() == [6.0, 6.0]
    made = runtime.counters.created
    assert made == {"Tensor": 6, "TensorList": 1, "Scalar": 2, "IntArray": 1}
    assert runtime.counters.live_handles == {}
    assert npu.live["tensors"] == npu.live["tensor_lists"] == 0


Change = Callable[[aclnn.Runtime, dict[str, Any]], dict[str, Any]]
REFUSED: dict[str, tuple[Change, type[aclnn.CannError], int, str]] = {
    "null query": (
        lambda r, a: {**a, "query": None}, aclnn.NullPointerError, 161001, "query",
    ),
    "null output": (
        lambda r, a: {**a, "attention_out": None}, aclnn.NullPointerError, 161001, "attention_out",
    ),
    "layout": (
        lambda r, a: {**a, "layout_query": "SBH"}, aclnn.TilingError, 561002, "layout_query",
    ),
    "sparse mode": (
        lambda r, a: {**a, "sparse_mode": 4}, aclnn.TilingError, 561002, "sparse_mode",
    ),
    "indices of 64 bits": (
        lambda r, a: {**a, "sparse_indices": r.empty((4, 1, 20), "int64")},
        aclnn.InvalidArgumentError, 161002, "sparse_indices",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_first_stage(
    name: str, npu: Emulator, runtime: aclnn.Runtime, call: dict[str, Any]
) -> None:
    change, kind, code, word = REFUSED[name]
    bad = change(runtime, call)
    with pytest.raises(aclnn.CannError) as caught:
        runtime.call(SPARSE, bad)
    error = caught.value
    assert type(error) is kind
    assert (error.code, error.symbol) == (code, f"{SPARSE}GetWorkspaceSize")
    assert word in error.detail
    assert str(code) in str(error)
    assert runtime.counters.refused == 1
    assert runtime.counters.live_handles == {}
    assert npu.live["tensors"] == npu.live["executors"] == 0
    assert attend(runtime, call).isfinite().all()  # the runtime still works


def test_a_short_workspace(npu: Emulator, runtime: aclnn.Runtime, call: dict[str, Any]) -> None:
    with runtime.prepare(SPARSE, call) as prepared:
        address, size = runtime.workspace(prepared.workspace_size)
        with pytest.raises(aclnn.ShortWorkspaceError) as caught:
            prepared.execute(address, size - 1)
        assert (caught.value.given, caught.value.needed) == (size - 1, prepared.workspace_size)
        with pytest.raises(aclnn.ShortWorkspaceError, match="workspace of 0 bytes"):
            prepared.execute()
    assert npu.live["executors"] == 0  # it never ran


def test_cann_itself_refuses_a_short_workspace(
    npu: Emulator, runtime: aclnn.Runtime, call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without our own check the second stage answers, as a typed error."""
    prepared = runtime.prepare(SPARSE, call)
    address, size = runtime.workspace(prepared.workspace_size)
    executor = prepared._executor
    monkeypatch.setattr(prepared, "workspace_size", 0)
    with pytest.raises(aclnn.InvalidArgumentError, match=f"workspace of {size - 1} bytes") as error:
        prepared.execute(address, size - 1)
    assert (error.value.code, error.value.symbol) == (161002, SPARSE)
    runtime.cann.call("aclDestroyAclOpExecutor", executor)
    prepared.close()


def test_a_reused_executor(npu: Emulator, runtime: aclnn.Runtime, call: dict[str, Any]) -> None:
    with runtime.prepare(SPARSE, call) as prepared:
        executor = prepared._executor
        space = runtime.workspace(prepared.workspace_size)
        prepared.execute(*space)
        with pytest.raises(aclnn.ExecutorReusedError, match="has served its call"):
            prepared.execute(*space)
        prepared._executor = executor  # control: without our own check CANN answers
        with pytest.raises(aclnn.InvalidArgumentError, match="no such executor"):
            prepared.execute(*space)
    with pytest.raises(aclnn.ExecutorReusedError):
        prepared.execute(*space)
    assert npu.prepared_calls == 0


@pytest.fixture
def full_device(npu: Emulator) -> Iterator[Callable[[int], None]]:
    """Leave so many free bytes."""
    memory = npu.options["memory_bytes"]
    yield lambda free: npu.set_memory(npu.live["device_bytes"] + free)
    npu.set_memory(memory)


def test_out_of_memory(
    npu: Emulator, runtime: aclnn.Runtime, call: dict[str, Any], full_device: Callable[[int], None]
) -> None:
    full_device(1024)
    held = runtime.counters.live_bytes
    with pytest.raises(aclnn.OutOfDeviceMemoryError) as caught:
        runtime.upload(torch.zeros(4096))
    assert (caught.value.code, caught.value.symbol) == (207001, "aclrtMalloc")
    with pytest.raises(aclnn.OutOfDeviceMemoryError):  # after a first stage that went well
        runtime.call(SPARSE, call)
    assert runtime.counters.live_bytes == held
    assert runtime.counters.live_handles == {}
    assert npu.live["executors"] == npu.prepared_calls == 0
    full_device(1 << 20)
    assert attend(runtime, call).isfinite().all()


def test_the_provider_frees_what_it_uploaded_when_memory_ends(
    npu: Emulator, full_device: Callable[[int], None]
) -> None:
    case = next(case for case in SERVED if case.op == "sparse_flash_attention")
    aclnn.default_runtime().close()
    before = npu.live
    full_device(40_000)
    with pytest.raises(aclnn.OutOfDeviceMemoryError):
        case.operator(**case.arguments(), provider="aclnn", profile=npu.profile)
    assert npu.live == before
    assert aclnn.default_runtime().counters.live_bytes == 0


def once(runtime: aclnn.Runtime, call: dict[str, Any]) -> None:
    runtime.call(SPARSE, call)


def short(runtime: aclnn.Runtime, call: dict[str, Any]) -> None:
    with runtime.prepare(SPARSE, call) as prepared:
        address, size = runtime.workspace(prepared.workspace_size)
        prepared.execute(address, size - 1)


def twice(runtime: aclnn.Runtime, call: dict[str, Any]) -> None:
    with runtime.prepare(SPARSE, call) as prepared:
        for _ in range(2):
            prepared.execute(*runtime.workspace(prepared.workspace_size))


def too_large(runtime: aclnn.Runtime, call: dict[str, Any]) -> None:
    with runtime.prepare(SPARSE, call), runtime.empty((1 << 44,), "int8"):
        raise AssertionError("there is no room for it")


# Run one after another: a call, and every way in which one fails.
ENDS: tuple[tuple[Callable[..., None], dict[str, Any], type[Exception] | None], ...] = (
    (once, {}, None),
    (once, {"query": None}, aclnn.NullPointerError),
    (once, {"sparse_indices": "query"}, aclnn.InvalidArgumentError),
    (once, {"layout_query": "SBH"}, aclnn.TilingError),
    (once, {"sparse_mode": None}, aclnn.ArrayError),
    (short, {}, aclnn.ShortWorkspaceError),
    (twice, {}, aclnn.ExecutorReusedError),
    (too_large, {}, aclnn.OutOfDeviceMemoryError),
)


def test_a_thousand_calls_leave_nothing(npu: Emulator, runtime: aclnn.Runtime) -> None:
    """Of every end in turn; uploads, workspace, executors and handles are counted."""
    inputs = direct.host_inputs()
    before, turns = npu.live, 1000
    with npu.without_kernels():
        for number in range(turns):
            run, changes, error = ENDS[number % len(ENDS)]
            call = direct.arguments(runtime, inputs)
            bad = {n: call.get(v, v) if isinstance(v, str) else v for n, v in changes.items()}
            with contextlib.nullcontext() if error is None else pytest.raises(error) as caught:
                run(runtime, call | bad)
            assert caught is None or type(caught.value) is error
            direct.free(call)
    counters, rounds = runtime.counters, turns // len(ENDS)
    assert (counters.calls, counters.refused) == (2 * rounds, 3 * rounds)
    assert counters.workspace_allocations == 1
    assert counters.live_handles == {}
    assert counters.live_allocations == 1  # the workspace
    left = npu.live
    assert left.pop("device_allocations") == before.pop("device_allocations") + 1
    assert left.pop("device_bytes") == before.pop("device_bytes") + 4096
    assert left == before
    assert npu.prepared_calls == 0


def test_a_leak_would_be_counted(npu: Emulator, runtime: aclnn.Runtime) -> None:
    """Control of the counters: what is kept shows, in both counts."""
    tensor = runtime.upload(torch.ones(3))
    prepared = runtime.prepare("aclnnAbs", {"self": tensor, "out": tensor})
    assert runtime.counters.live_handles == {"Tensor": 2}
    assert (npu.live["tensors"], npu.live["executors"]) == (2, 1)
    assert runtime.counters.live_bytes == 12
    prepared.close()
    tensor.close()
    tensor.close()
    assert (runtime.counters.allocations, runtime.counters.frees) == (1, 1)
    assert npu.live["tensors"] == npu.live["executors"] == 0


def test_a_larger_workspace_replaces_the_smaller(runtime: aclnn.Runtime) -> None:
    first, size = runtime.workspace(1000)
    assert runtime.workspace(500) == (first, size)
    assert runtime.workspace(2000)[1] == 2000
    assert runtime.counters.live_bytes == 2000
    assert runtime.counters.synchronisations == 1  # before the smaller one was freed


def test_wrong_use_is_named(npu: Emulator, runtime: aclnn.Runtime, call: dict[str, Any]) -> None:
    bad: dict[str, tuple[Any, str]] = {
        "query": (torch.ones(3), "found Tensor on cpu"),
        "layout_query": (3, "layout_query: found 3; allowed: str"),
        "scale_value": ("much", "scale_value: found 'much'; allowed: double"),
        "sparse_mode": (None, "sparse_mode: found None"),
        "qeury": (None, "found the arguments qeury"),
    }
    for name, (value, text) in bad.items():
        with pytest.raises(aclnn.ArrayError, match=text):
            runtime.call(SPARSE, {**call, name: value})
    gone = runtime.empty((4, 4, 512), "bfloat16")
    gone.close()
    with pytest.raises(aclnn.ClosedError, match=r"bfloat16\[4, 4, 512\] is closed"):
        runtime.call(SPARSE, {**call, "attention_out": gone})
    with pytest.raises(aclnn.ArrayError, match="float99"):
        runtime.empty((1,), "float99")
    with pytest.raises(aclnn.ArrayError, match="found list"):
        runtime.upload([1, 2])
    assert runtime.counters.live_handles == {}
    with pytest.raises(aclnn.CannError, match="aclrtSetDevice returned 107001"):
        aclnn.Runtime(99)


def test_an_operator_that_this_cann_lacks(npu: Emulator, runtime: aclnn.Runtime) -> None:
    with pytest.raises(aclnn.MissingOperatorError, match="aclnnNoSuchOp"):
        runtime.cann.function("aclnnNoSuchOpGetWorkspaceSize")
    assert not runtime.cann.has("aclnnNoSuchOpGetWorkspaceSize")
    assert runtime.cann.has(f"{SPARSE}GetWorkspaceSize")


def test_the_provider_is_offered_after_torch_npu(npu: Emulator) -> None:
    case = next(case for case in SERVED if case.op == "sparse_flash_attention")
    record = case.operator.bind(**on_npu(case.arguments()))
    explanation = ops.explain(case.op, record, npu.profile)
    assert list(explanation.reasons) == ["torch_npu", "aclnn", "reference"]
    assert explanation.reasons["aclnn"] == ()
