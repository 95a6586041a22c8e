from __future__ import annotations

import importlib
from typing import Any

import attrs
import pytest
import torch
from flash_attn_problems import (
    TEMPLATE,
    Problem,
    arguments_of,
    expected,
    ints,
    problems,
    tensors_of,
)
from hypothesis import given, settings
from hypothesis_scale import scale

import ascend_attn_ops as ops
from ascend_hwprofile import profile_for

PROVIDERS = ("reference", "cpu")


def compute(arguments: dict[str, Any], provider: str) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.flash_attn(**arguments, provider=provider)


@settings(max_examples=scale(400))
@given(problems())
def test_providers_agree_with_the_formula(p: Problem) -> None:
    t = tensors_of(p, torch.float32)
    arguments = arguments_of(p, t)
    out, lse = expected(p, t)
    for provider in PROVIDERS:
        got, got_lse = compute(arguments, provider)
        assert got.dtype == torch.float32
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), out, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(got_lse.double(), lse, rtol=2e-5, atol=2e-5)


@settings(max_examples=scale(160))
@given(problems())
def test_half_precision_differs_by_rounding_only(p: Problem) -> None:
    """P and the output are each rounded to half precision: at most eps / 2 of the largest value."""
    for dtype in ops.flash_attn.tolerances:
        t = tensors_of(p, dtype)
        arguments = arguments_of(p, t)
        want, want_lse = compute(arguments, "reference")
        got, got_lse = compute(arguments, "cpu")
        assert got.dtype == dtype
        assert got_lse.dtype == torch.float32
        largest = max((float(v.abs().max()) for v in t.values if v.numel()), default=0.0)
        difference = (got.double() - want.double()).abs()
        assert float(difference.max() if difference.numel() else 0) <= (
            torch.finfo(dtype).eps * largest
        )
        torch.testing.assert_close(got_lse, want_lse, rtol=1e-4, atol=1e-4)


@settings(max_examples=scale(24))
@given(problems())
def test_float64_is_computed_in_float64(p: Problem) -> None:
    t = tensors_of(p, torch.float64)
    out, _ = expected(p, t)
    for provider in PROVIDERS:
        got, _ = compute(arguments_of(p, t), provider)
        torch.testing.assert_close(got, out, rtol=1e-11, atol=1e-11)


def case(**changes: Any) -> Problem:
    base = Problem(
        "TND", "PA_BBND", "TND", [3, 0, 5], [48] * 3, None, [20, 7, 40], 2, 2, 32, 16, 3, -1, -1,
        sinks=False, strided=False, seed=5,
    )  # fmt: skip
    return attrs.evolve(base, **changes)


def call(p: Problem, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return arguments_of(p, tensors_of(p, dtype))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("layout_kv", ["TND", "PA_BBND", "PA_BNBD", "PA_NZ"])
@pytest.mark.parametrize("mode", [0, 3, 4])
def test_many_tiles_equal_one(
    provider: str, layout_kv: str, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [150, 30, 97]
    p = case(
        layout_kv=layout_kv, q_rooms=[70, 1, 2], mode=mode, left=20 if mode == 4 else -1,
        kv_rooms=lengths, kv_used=None if layout_kv == "TND" else lengths,
    )  # fmt: skip
    whole, whole_lse = compute(call(p), provider)
    module = importlib.import_module("ascend_attn_ops.operators.flash_attn.cpu")
    monkeypatch.setattr(module, "_TILE_ELEMENTS", 1)
    monkeypatch.setattr(module, "_QUERY_TILE", 7)
    tiled, tiled_lse = compute(call(p), provider)
    torch.testing.assert_close(tiled, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tiled_lse, whole_lse, rtol=1e-5, atol=1e-6)
    assert bool(whole.any())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_window_counts_the_key_itself_on_top_of_left(provider: str) -> None:
    """Window 1 attends to itself only; 4 of 10 keys are keys 6 .. 9."""
    for left, keys in ((0, [9]), (3, [6, 7, 8, 9])):
        p = case(q_rooms=[1], kv_rooms=[16], kv_used=[10], mode=4, left=left, right=0, group=1)
        t = tensors_of(p, torch.float32)
        one_hot = torch.eye(16, 32)[:10, None].expand(-1, 2, -1)
        out, _ = compute(arguments_of(p, attrs.evolve(t, values=[one_hot])), provider)
        assert out[0, 0].nonzero().flatten().tolist() == keys


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_without_keys_are_zero_with_infinite_lse(provider: str) -> None:
    p = case(q_rooms=[4, 2, 3], q_used=[4, 1, 3], kv_rooms=[16] * 3, kv_used=[2, 5, 0])
    for sinks in (False, True):
        out, lse = compute(call(attrs.evolve(p, sinks=sinks)), provider)
        empty = [0, 1, 5, 6, 7, 8]  # two above the first key, one padding row, three without keys
        assert lse.shape == (4, 9)
        assert bool(lse[:, empty].isposinf().all())
        assert not out[empty].any()
        rest = [2, 3, 4]
        assert bool(lse[:, rest].isfinite().all())
        assert bool(out[rest].any(-1).all())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_lse_is_not_returned_unless_asked_for(provider: str) -> None:
    arguments = call(case())
    out, lse = compute(arguments, provider)
    plain, nothing = compute(arguments | {"return_softmax_lse": False}, provider)
    assert torch.equal(out, plain)
    assert lse.shape == (4, 8)
    assert nothing.shape == (0,)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_default_scale_is_one(provider: str) -> None:
    arguments = call(case())
    one, _ = compute(arguments | {"softmax_scale": 1.0}, provider)
    del arguments["softmax_scale"]
    torch.testing.assert_close(compute(arguments, provider)[0], one)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_lengths_beyond_int32_addresses(provider: str) -> None:
    """Block 70000 starts past element 2^31 of the cache; only two blocks are ever touched."""
    blocks, stride = 70_001, 2**15 + 2**12
    storage = torch.empty(blocks * stride, dtype=torch.bfloat16)
    cache = storage.as_strided((blocks, 16, 1, 128), (stride, 128, 128, 1))
    assert 70_000 * stride > 2**31
    cache[3], cache[70_000] = 0.25, 0.5
    out, _ = ops.flash_attn(
        torch.ones(1, 1, 128, dtype=torch.bfloat16), cache, cache, ints([[70_000, 3]]),
        cu_seqlens_q=ints([0, 1]), seqused_kv=ints([32]), softmax_scale=0.0, layout_q="TND",
        layout_kv="PA_BBND", layout_out="TND", provider=provider,
    )  # fmt: skip
    torch.testing.assert_close(out.float(), torch.full((1, 1, 128), 0.375))


def test_cpu_differs_when_the_mask_does() -> None:
    """Negative control: the comparisons above can fail."""
    causal, _ = compute(call(case(mode=3)), "cpu")
    full, _ = compute(call(case(mode=0)), "reference")
    assert not torch.allclose(causal, full, rtol=1e-2, atol=1e-2)


def test_gqa_reads_the_key_head_of_the_group() -> None:
    p = case(group=2, kv_heads=2, mode=0)
    t = tensors_of(p, torch.float32)
    values = [torch.cat([torch.ones(n, 1, 32), torch.full((n, 1, 32), 2.0)], 1) for n in p.kv_lens]
    out, _ = compute(arguments_of(p, attrs.evolve(t, values=values)), "cpu")
    torch.testing.assert_close(out[:, :2], torch.ones(8, 2, 32))
    torch.testing.assert_close(out[:, 2:], torch.full((8, 2, 32), 2.0))


def test_opcheck() -> None:
    arguments = call(case())
    args = tuple(arguments.pop(name) for name in ("q", "k", "v"))
    torch.library.opcheck(torch.ops.ascend_attn.flash_attn, args, arguments)


@pytest.mark.parametrize(("layout_q", "layout_out"), [("BNSD", "BSND"), ("BSND", "BSND")])
def test_compiles_whole_and_gives_the_same(layout_q: str, layout_out: str) -> None:
    p = case(layout_q=layout_q, layout_out=layout_out, q_rooms=[5] * 3, q_used=[3, 0, 5])
    arguments = call(p)
    q = arguments.pop("q")

    def twice(q: torch.Tensor) -> torch.Tensor:
        out, lse = torch.ops.ascend_attn.flash_attn(q * 1, **arguments)
        return out.sum(1) * 2 + lse.nan_to_num(posinf=0.0).sum()

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), twice(q))


def test_vendor_call_is_by_keyword_and_drops_empty_sinks() -> None:
    (build,) = ops.flash_attn.npu_calls.values()
    arguments = call(case())
    plan = torch.zeros(4096, dtype=torch.int32)
    bound = ops.flash_attn.bind(**arguments | {"sinks": torch.empty(0), "metadata": plan})
    made = build(bound)
    assert made.function == "flash_attn"
    assert made.args == (bound.q, bound.k, bound.v)
    assert made.kwargs["metadata"] is plan
    assert made.kwargs["attn_mask"] is TEMPLATE
    assert "sinks" not in made.kwargs
    assert made.kwargs["mask_mode"] == 3
    assert (made.kwargs["max_seqlen_q"], made.kwargs["max_seqlen_kv"]) == (5, 40)


def test_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(ops.ProviderUnavailableError, match="ops-transformer package of CANN"):
        compute(call(case()), "cann_ops_transformer")


def test_partial_attention_takes_the_lse_of_tnd() -> None:
    p = case(q_rooms=[4, 2, 3], kv_rooms=[16] * 3, kv_used=[2, 5, 0])
    out, lse = compute(call(p), "cpu")
    part = ops.PartialAttention.from_infinite_lse(out, lse.T)
    assert part.lse[6:].isneginf().all()
    assert torch.equal(part.lse[2], lse[:, 2])


def test_judged_for_a5_only() -> None:
    sample = next(iter(ops.flash_attn.samples()))
    assert ops.check("flash_attn", sample.data, profile_for("A5")) == []
    refusals = ops.check("flash_attn", sample.data, profile_for("A3"))
    assert [refusal.rule for refusal in refusals] == ["product"]
