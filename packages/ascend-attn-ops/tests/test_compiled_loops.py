"""Decode and cache writes by compiled loops: against a float64 formula, and when they are taken."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from decode_layers import BLOCK, HEADS, SIZE, arguments, layer, without_loops
from fia_oracle import dense
from hypothesis import given
from hypothesis import strategies as st

import ascend_attn_ops as ops
from ascend_attn_ops import step_calls
from ascend_attn_ops.operators._shared import compiled, numba_loops
from ascend_attn_ops.operators._shared.fused_infer import compiled_decode
from ascend_attn_ops.operators.scatter_pa_kv_cache import compiled_write

BLOCKS = 40


def shuffled_table(lengths: list[int], block_size: int) -> torch.Tensor:
    columns = -(-max(lengths) // block_size)
    return torch.randperm(BLOCKS)[: len(lengths) * columns].view(len(lengths), columns).int()


def rows_of(cache: torch.Tensor, table: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """[length, KN, size] of each request, gathered from [num_blocks, KN, block_size, size]."""
    return [
        torch.cat([cache[block].transpose(0, 1) for block in row.tolist()])[:length]
        for row, length in zip(table, lengths, strict=True)
    ]


def decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor,
    lengths: list[int], **changes: Any,
) -> Any:  # fmt: skip
    return ops.fused_infer_attention_score(
        query, key, value, actual_seq_lengths=tuple(range(1, len(lengths) + 1)),
        actual_seq_lengths_kv=tuple(lengths), block_table=table, num_heads=query.shape[1],
        num_key_value_heads=key.shape[1], input_layout="TND", block_size=key.shape[2],
        softmax_lse_flag=True, provider="cpu", **{"scale": 0.3, **changes},
    )  # fmt: skip


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the loops that ran."""
    ran: list[str] = []
    for module, name in ((compiled_decode, "decode"), (compiled_write, "write")):
        loop = module._loop()
        assert loop is not None

        def counted(*addresses: int, loop: Any = loop, name: str = name) -> int:
            ran.append(name)
            result: int = loop(*addresses)
            return result

        monkeypatch.setattr(module, "_loop", lambda counted=counted: counted)
    return ran


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 2), (8, 8)]),
    size=st.sampled_from([16, 64, 80]),
    block_size=st.sampled_from([16, 32]),
    seed=st.integers(0, 99),
)
def test_decode_equals_the_float64_formula(
    lengths: list[int], heads: tuple[int, int], size: int, block_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    cache = torch.randn(BLOCKS, heads[1], block_size, 2 * size)
    key, value = cache[..., :size], cache[..., size:]
    query, table = torch.randn(len(lengths), heads[0], size), shuffled_table(lengths, block_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_decode, "few_products", lambda *_: True)
        out, lse = decode(query, key, value, table, lengths)
    rows = rows_of(key, table, lengths), rows_of(value, table, lengths)
    want, want_lse = dense(query, *rows, [1] * len(lengths), scale=0.3, mode=0)
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse[..., 0].double(), want_lse, rtol=2e-6, atol=2e-6)
    if max(lengths) > 1:  # the control: other weights
        wrong = dense(query, *rows, [1] * len(lengths), scale=0.31, mode=0)[1]
        assert (wrong - want_lse).abs().max() > 1e-4


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 87.0, 1e4])
def test_weights_are_right_for_scores_of_any_spread(spread: float, loops: list[str]) -> None:
    """The loop has an exponential function of its own."""
    lengths = [37]
    key = torch.zeros(BLOCKS, 1, 16, 16)
    scores = torch.linspace(-spread, 0, 37)[torch.randperm(37)]
    table = shuffled_table(lengths, 16)
    for position, score in enumerate(scores.tolist()):
        key[table[0, position // 16], 0, position % 16, 0] = score
    value = torch.randn(BLOCKS, 1, 16, 16)
    query = torch.zeros(1, 1, 16)
    query[..., 0] = 1.0
    out, lse = decode(query, key, value, table, lengths, scale=1.0)
    weights = torch.softmax(scores.double(), 0)
    want = weights @ rows_of(value, table, lengths)[0][:, 0].double()
    torch.testing.assert_close(out[0, 0].double(), want, rtol=1e-6, atol=1e-6)
    assert float(lse[0, 0, 0]) == pytest.approx(float(scores.double().logsumexp(0)), rel=1e-6)
    assert loops == ["decode"]


def test_what_is_not_a_number_stays_so(loops: list[str]) -> None:
    query, table = torch.randn(2, 2, 16), torch.tensor([[0], [1]], dtype=torch.int32)
    key, value = torch.randn(BLOCKS, 2, 16, 16), torch.randn(BLOCKS, 2, 16, 16)
    for poisoned in (key, value):
        poisoned[0, 1, 3] = float("nan")
        out, _ = decode(query, key, value, table, [5, 5])
        assert out[0, 1].isnan().all()
        assert out[1].isfinite().all()
        assert out[0, 0].isfinite().all()
        poisoned[0, 1, 3] = 0.0
    assert loops == ["decode", "decode"]


def test_queries_may_have_any_strides(loops: list[str]) -> None:
    key, value = torch.randn(BLOCKS, 2, 16, 16), torch.randn(BLOCKS, 2, 16, 16)
    wide, table = torch.randn(4, 3, 32), shuffled_table([9, 30, 4], 16)
    query = wide.transpose(0, 1)[..., 8:24]
    got = decode(query, key, value, table, [9, 30, 4])
    want = decode(query.contiguous(), key, value, table, [9, 30, 4])
    assert torch.equal(got[0], want[0])
    assert loops == ["decode", "decode"]


def test_rows_beside_prompts_equal_the_reference(loops: list[str]) -> None:
    shared = arguments((64, 9, 200), actual_seq_lengths=(1, 5, 6), softmax_lse_flag=True)
    tensors = layer((64, 9, 200)) | {"query": torch.randn(6, HEADS, SIZE)}
    got = ops.fused_infer_attention_score(**tensors, **shared, provider="cpu")
    want = ops.fused_infer_attention_score(**tensors, **shared, provider="reference")
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert loops == ["decode"]


def test_many_products_are_left_to_the_threads_of_torch(
    loops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, tensors = arguments((100, 100)), layer((100, 100))
    few = 2 * HEADS * SIZE * 200
    for threads, most, compiled_runs in ((4, few, 1), (4, few - 1, 1), (1, few - 1, 2)):
        monkeypatch.setattr(compiled_decode, "MOST_PRODUCTS", most)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        ops.call(ops.fused_infer_attention_score, tensors, **shared)
        assert len(loops) == compiled_runs


def test_other_dtypes_are_left_to_torch(loops: list[str]) -> None:
    key = torch.randn(BLOCKS, 2, 16, 16, dtype=torch.bfloat16)
    query = torch.randn(1, 2, 16, dtype=torch.bfloat16)
    decode(query, key, key, torch.tensor([[0]], dtype=torch.int32), [5])
    assert loops == []


class Steps:
    """Steps of a series over the same layers."""

    def __init__(self, requests: int, columns: int) -> None:
        self.series = ops.CallSeries()
        self.shared = arguments((1,) * requests)
        self.columns = columns
        blocks = torch.randn(requests * columns, 2, BLOCK, 2 * SIZE)
        self.tensors = {"key": blocks[..., :SIZE], "value": blocks[..., SIZE:]}
        self.ids = torch.randperm(requests * columns).view(requests, columns).int()

    def step(self, lengths: tuple[int, ...], **changes: Any) -> None:
        """One step, whose outputs must be those of the reference."""
        columns = max(1, -(-max(lengths) // BLOCK))
        own = {"actual_seq_lengths_kv": lengths, "block_table": self.ids[:, :columns].clone()}
        shared = self.shared | own | changes
        tensors = {"query": torch.randn(len(lengths), HEADS, SIZE), **self.tensors}
        calls = ops.StepCalls(self.series)
        for _ in range(2):
            got = calls(ops.fused_infer_attention_score, tensors, None, lambda: shared)
            want = ops.fused_infer_attention_score(**tensors, **shared, provider="reference")
            torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the calls that were checked and planned."""
    seen: list[Any] = []
    original = step_calls._prepared

    def watched(op: Any, tensors: Any, fixed: Any) -> Any:
        seen.append(fixed)
        return original(op, tensors, fixed)

    monkeypatch.setattr(step_calls, "_prepared", watched)
    return seen


def test_further_steps_of_a_series_are_not_prepared_anew(prepared: list[Any]) -> None:
    steps = Steps(3, 3)
    for length in (1, 2, 127, 128, 129, 130, 300, 384):
        steps.step((length, 1 + length // 2, 384 - length + 1))
    assert len(prepared) == 1


def test_what_a_series_cannot_renew_is_prepared(prepared: list[Any]) -> None:
    steps = Steps(2, 3)
    steps.step((100, 20))
    for lengths, changes in (
        ((101, 21), {"scale": 0.5}),
        ((102, 0), {"scale": 0.5}),  # a request without keys
        ((103, 23), {"scale": 0.5}),
        ((103, 23), {"scale": 0.5, "softmax_lse_flag": True}),
    ):
        before = len(prepared)
        steps.step(lengths, **changes)
        assert len(prepared) == before + 1


def test_a_series_refuses_what_the_contract_refuses() -> None:
    steps = Steps(2, 3)
    steps.step((100, 20))
    with pytest.raises(ops.OpArgumentError, match="actual_seq_lengths_kv"):
        steps.step((101, 400), block_table=steps.ids)
    with pytest.raises(ops.OpArgumentError, match="actual_seq_lengths_kv"):
        steps.step((101, -1))
    steps.ids[1, 0] = 99
    with pytest.raises(IndexError, match=r"block_table\[1, 0\]: found 99, allowed: 0 to 5"):
        steps.step((101, 21))


def test_a_series_keeps_no_tensors_of_layers() -> None:
    steps = Steps(2, 2)
    steps.step((100, 20))
    steps.step((101, 21))
    cache = weakref.ref(steps.tensors.pop("key"))
    gc.collect()
    assert cache() is None


def write(slots: list[int], calls: ops.StepCalls | None = None, **changes: torch.Tensor) -> Any:
    cache = torch.zeros(4, 2, 8, 24)
    key_cache, value_cache = cache[..., :16].transpose(1, 2), cache[..., 16:].transpose(1, 2)
    tensors = {
        "key": torch.randn(len(slots), 2, 16), "value": torch.randn(len(slots), 2, 8),
        "key_cache": key_cache, "value_cache": value_cache,
        "slot_mapping": torch.tensor(slots), **changes,
    }  # fmt: skip
    calls = calls or ops.StepCalls()
    calls(ops.scatter_pa_kv_cache, tensors, None, lambda: {"cache_mode": "Norm"})
    return tensors, cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_tokens_are_written_as_by_the_reference(dtype: torch.dtype, loops: list[str]) -> None:
    slots = [31, -1, 0, 9, -7, 16]
    own = {
        "key": torch.randint(-9, 9, (6, 2, 16)).to(dtype),
        "value": torch.randint(-9, 9, (6, 2, 8)).to(dtype),
        "key_cache": torch.zeros(4, 8, 2, 16, dtype=dtype),
        "value_cache": torch.zeros(4, 8, 2, 8, dtype=dtype),
    }
    got, _ = write(slots, **own)
    fresh = {name: torch.zeros_like(own[name]) for name in ("key_cache", "value_cache")}
    want = {**got, **fresh}
    ops.scatter_pa_kv_cache(**want, cache_mode="Norm", provider="reference")
    for name in fresh:
        assert torch.equal(got[name], want[name])
        assert got[name].any()
    assert loops == ["write"]


def test_a_slot_beyond_the_cache_is_named_and_nothing_written(loops: list[str]) -> None:
    calls = ops.StepCalls()
    write([3, 2], calls)
    _, cache = write([31, 5], calls)
    assert cache.any()
    untouched = torch.zeros(4, 8, 2, 16)
    with pytest.raises(IndexError, match=r"slot_mapping\[1\]: found 32, allowed: below 32"):
        write([3, 32], key_cache=untouched)
    assert not untouched.any()


def test_slots_of_32_bits_are_left_to_torch(loops: list[str]) -> None:
    tensors, cache = write([3], slot_mapping=torch.tensor([3], dtype=torch.int32))
    assert torch.equal(cache[0, :, 3, :16], tensors["key"][0])
    assert loops == []


def test_without_numba_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, tensors = arguments(), layer()
    want = ops.call(ops.fused_infer_attention_score, tensors, **shared)[0]
    without_loops(monkeypatch)
    got = ops.call(ops.fused_infer_attention_score, tensors, **shared)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def child(code: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], env={"PATH": "", **environment},
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout.strip()  # fmt: skip


def test_a_plan_begins_with_as_many_numbers_as_its_loop_skips() -> None:
    from ascend_attn_ops.operators._shared.fused_infer import decode_kernel

    assert len(compiled_decode.PLAN) == decode_kernel.HEAD


def test_numba_is_imported_by_the_first_step_that_needs_it() -> None:
    code = (
        "import sys, ascend_attn_ops as ops; before = 'numba' in sys.modules; "
        "print(before, ops.compile_loops(), 'numba' in sys.modules)"
    )
    assert child(code) == "False True True"
    assert child(code, NUMBA_DISABLE_JIT="1") == "False False False"


def test_without_numba_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    assert not compiled.compiles.__wrapped__()


def answer(address: int) -> int:
    return 42


def test_without_a_folder_for_its_results_each_process_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = numba_loops.cfunc

    def without_folder(signature: Any, *, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function 'answer': no locator available")
        return original(signature, **options)

    monkeypatch.setattr(numba_loops, "cfunc", without_folder)
    with caplog.at_level("INFO"):
        assert numba_loops.kernel(answer, addresses=1)(0) == 42
    assert "answer is compiled by each process: cannot cache" in caplog.text
