"""Calls without torch's dispatcher, and calls of one step that are checked and planned once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from decode_layers import (
    HEADS,
    LENGTHS,
    SIZE,
    arguments,
    latent_layer,
    layer,
    without_loops,
)
from torch.utils._python_dispatch import TorchDispatchMode

import ascend_attn_ops as ops
from ascend_attn_ops import step_calls


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test with the compiled loops and without."""
    name: str = request.param
    if name == "torch":
        without_loops(monkeypatch)
    else:
        assert ops.compile_loops()
    return name


def repeat(calls: ops.StepCalls, tensors: dict[str, torch.Tensor], shared: dict[str, Any]) -> Any:
    """The call of one layer among those of its step."""
    return calls(ops.fused_infer_attention_score, tensors, shared["scale"], lambda: shared)


def attend(tensors: dict[str, torch.Tensor], shared: dict[str, Any]) -> Any:
    """The call of one layer alone."""
    return ops.call(ops.fused_infer_attention_score, tensors, **shared)


def norm() -> dict[str, str]:
    return {"cache_mode": "Norm"}


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators whose calls were checked and planned."""
    names: list[str] = []
    original = step_calls._prepared

    def watched(op: Any, *rest: Any) -> Any:
        names.append(op.name)
        return original(op, *rest)

    monkeypatch.setattr(step_calls, "_prepared", watched)
    return names


def assert_equals_reference(
    got: Any, tensors: dict[str, torch.Tensor], shared: dict[str, Any]
) -> None:
    want = ops.fused_infer_attention_score(**tensors, **shared, provider="reference")
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("lengths", [(100,), (7, 7), LENGTHS, (0, 5, 0)])
def test_every_layer_of_a_step_equals_the_reference(lengths: tuple[int, ...], lse: bool) -> None:
    shared, calls = arguments(lengths, softmax_lse_flag=lse), ops.StepCalls()
    for _ in range(3):
        tensors = layer(lengths)
        got = repeat(calls, tensors, shared)
        assert_equals_reference(got, tensors, shared)


@pytest.mark.parametrize("joined", [True, False])
def test_latent_layers_equal_the_reference(joined: bool) -> None:
    shared, calls = arguments(num_key_value_heads=1), ops.StepCalls()
    for _ in range(2):
        tensors = latent_layer(LENGTHS, joined=joined)
        got = repeat(calls, tensors, shared)
        assert_equals_reference(got, tensors, shared)


def test_slots_that_nobody_wrote_may_hold_anything() -> None:
    shared, tensors = arguments((5, 130)), layer((5, 130))
    block = int(shared["block_table"][0, 0])
    for name in ("key", "value"):
        tensors[name][block, :, 5:] = float("nan")
    got = repeat(ops.StepCalls(), tensors, shared)[0]
    assert got.isfinite().all()
    tensors["key"][block, :, 4] = float("nan")  # the control: a key that is read
    assert repeat(ops.StepCalls(), tensors, shared)[0].isnan().any()


def test_a_prompt_in_the_step_equals_the_reference(prepared: list[str]) -> None:
    shared = arguments((64, 9), actual_seq_lengths=(1, 5))
    calls, tensors = ops.StepCalls(), layer((64, 9))
    for _ in range(2):
        tensors["query"] = torch.randn(5, HEADS, SIZE)
        got = repeat(calls, tensors, shared)
        assert_equals_reference(got, tensors, shared)
    assert len(prepared) == 1


def test_layers_of_one_kind_are_prepared_once(prepared: list[str]) -> None:
    shared, calls = arguments(), ops.StepCalls()
    for _ in range(5):
        repeat(calls, layer(), shared)
    assert len(prepared) == 1
    repeat(calls, layer(), shared | {"scale": 0.2})
    other_strides = layer() | {"key": layer()["key"].contiguous()}
    repeat(calls, other_strides, shared)
    assert len(prepared) == 3


def test_a_block_that_does_not_exist_is_named() -> None:
    shared = arguments((5, 5)) | {"block_table": torch.tensor([[0], [2]], dtype=torch.int32)}
    with pytest.raises(IndexError, match=r"block_table\[1, 0\]: found 2, allowed: 0 to 1"):
        repeat(ops.StepCalls(), layer((5, 5)), shared)


def test_broken_arguments_are_refused() -> None:
    with pytest.raises(ops.OpArgumentError, match="num_heads"):
        repeat(ops.StepCalls(), layer(), arguments(num_heads=5))


def test_another_provider_is_asked_although_the_call_was_prepared() -> None:
    shared, calls, tensors = arguments(), ops.StepCalls(), layer()
    repeat(calls, tensors, shared)
    with ops.use_provider("torch_npu"), pytest.raises(ops.ProviderUnavailableError):
        repeat(calls, tensors, shared)


def test_values_are_checked_while_sanitizing() -> None:
    tensors = {"key": torch.zeros(2, 1, 8), "value": torch.zeros(2, 1, 8)}
    caches = {"key_cache": torch.zeros(1, 4, 1, 8), "value_cache": torch.zeros(1, 4, 1, 8)}
    twice = tensors | caches | {"slot_mapping": torch.tensor([3, 3])}
    once = twice | {"slot_mapping": torch.tensor([3, 2])}
    calls = ops.StepCalls()
    calls(ops.scatter_pa_kv_cache, twice, None, norm)
    ways = (ops.call, lambda op, own, **_: calls(op, own, None, norm))
    for way in ways:
        with ops.sanitize():
            way(ops.scatter_pa_kv_cache, once, cache_mode="Norm")
            with pytest.raises(ops.SanitizerError, match="slot 3"):
                way(ops.scatter_pa_kv_cache, twice, cache_mode="Norm")


def test_a_layer_that_keeps_its_calls_keeps_no_rows() -> None:
    calls, cache = ops.StepCalls(), torch.zeros(1, 4, 1, 8)
    rows = {"key": torch.ones(1, 1, 8), "value": torch.ones(1, 1, 8)}
    own = rows | {"key_cache": cache, "value_cache": cache, "slot_mapping": torch.tensor([2])}
    calls(ops.scatter_pa_kv_cache, own, None, norm)
    key = weakref.ref(rows.pop("key"))
    del own
    gc.collect()
    assert key() is None
    assert calls._ready
    assert cache[0, 2].eq(1).all()


class Recorder(TorchDispatchMode):
    """Names of the operators of this package that torch's dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ascend_attn":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", [attend, lambda *call: repeat(ops.StepCalls(), *call)])
def test_a_dispatch_mode_sees_the_call_and_nothing_changes(way: Any) -> None:
    shared, tensors = arguments(), layer()
    alone = way(tensors, shared)
    with Recorder() as recorder:
        followed = way(tensors, shared)
    assert recorder.names == ["ascend_attn::fused_infer_attention_score"]
    torch.testing.assert_close(followed[0], alone[0])


def test_tensors_of_other_kinds_go_through_the_dispatcher() -> None:
    plain = torch.zeros(1)
    assert not step_calls.is_followed(plain)
    assert step_calls.is_followed(plain.to("meta"))
    assert step_calls.is_followed(torch.nn.Parameter(plain))


def test_a_compiler_follows_the_call() -> None:
    shared, tensors = arguments(), layer()

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(query: torch.Tensor) -> Any:
        own = tensors | {"query": query * 1}
        return ops.call(ops.fused_infer_attention_score, own, **shared)[0]

    eager = ops.call(ops.fused_infer_attention_score, tensors, **shared)[0]
    torch.testing.assert_close(compiled(tensors["query"]), eager)
