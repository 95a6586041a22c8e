from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from fia_oracle import TEMPLATE, dense
from hypothesis import given
from hypothesis import strategies as st

import ascend_attn_ops as ops

PROVIDERS = ("reference", "cpu")


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    requests = draw(st.integers(1, 5))
    heads = draw(st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3), (8, 1)]))
    return {
        "q_lens": draw(st.lists(st.integers(0, 9), min_size=requests, max_size=requests)),
        "kv_lens": draw(st.lists(st.integers(0, 70), min_size=requests, max_size=requests)),
        "heads": heads,
        "size": draw(st.sampled_from([8, 16, 24])),
        "block_size": draw(st.sampled_from([16, 32, 128])),
        "mode": draw(st.sampled_from([0, 3, 4])),
        "pre": draw(st.integers(0, 30)),
        "nxt": draw(st.integers(0, 3)),
        "flat": draw(st.booleans()),
        "strided": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


def paged(p: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], Any]:
    """Call arguments and the request-wise keys and values they stand for."""
    rng = torch.Generator().manual_seed(p["seed"])
    heads, kv_heads = p["heads"]
    bs, size = p["block_size"], p["size"]
    columns = max(-(-n // bs) for n in p["kv_lens"]) or 1
    blocks = columns * len(p["kv_lens"]) + 1
    table = torch.randperm(blocks, generator=rng)[: columns * len(p["kv_lens"])]
    table = table.view(-1, columns).int()
    width = 2 * size if p["strided"] else size
    caches = []
    for _ in range(2):
        store = torch.randn(blocks, kv_heads, bs, width, generator=rng).to(dtype)
        caches.append(store[..., :size])
    rows = [
        [c[table[i].long()].transpose(1, 2).reshape(-1, kv_heads, size)[:n] for c in caches]
        for i, n in enumerate(p["kv_lens"])
    ]
    for i, n in enumerate(p["kv_lens"]):  # columns that no length reads may hold anything
        table[i, -(-n // bs) :] = -7
    total = sum(p["q_lens"])
    if p["flat"]:
        caches = [c.transpose(1, 2).reshape(blocks, bs, -1) for c in caches]
    arguments = {
        "query": torch.randn(total, heads, size, generator=rng).to(dtype),
        "key": caches[0],
        "value": caches[1],
        "atten_mask": None if p["mode"] == 0 else TEMPLATE,
        "actual_seq_lengths": torch.tensor(p["q_lens"]).cumsum(0).tolist(),
        "actual_seq_lengths_kv": p["kv_lens"],
        "block_table": table,
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": "TND",
        "sparse_mode": p["mode"],
        "pre_tokens": p["pre"],
        "next_tokens": p["nxt"],
        "block_size": bs,
        "scale": 0.3,
        "softmax_lse_flag": True,
    }
    return arguments, rows


def expected(p: dict[str, Any], arguments: dict[str, Any], rows: Any, **changes: Any) -> Any:
    keys, values = zip(*rows, strict=True)
    settings = {"mode": p["mode"], "pre": p["pre"], "nxt": p["nxt"], "scale": 0.3} | changes
    return dense(arguments["query"], list(keys), list(values), p["q_lens"], **settings)


@given(problems())
def test_providers_equal_dense_float64(p: dict[str, Any]) -> None:
    arguments, rows = paged(p)
    out, lse = expected(p, arguments, rows)
    for provider in PROVIDERS:
        got, got_lse = ops.fused_infer_attention_score(**arguments, provider=provider)
        torch.testing.assert_close(got.double(), out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got_lse[..., 0].double(), lse, rtol=1e-5, atol=1e-5)


@given(problems(), st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_within_the_vendor_tolerance(p: dict[str, Any], dtype: torch.dtype) -> None:
    arguments, rows = paged(p, dtype)
    out, _ = expected(p, arguments, rows)
    tolerance = ops.fused_infer_attention_score.tolerances[dtype]
    for provider in PROVIDERS:
        got, _ = ops.fused_infer_attention_score(**arguments, provider=provider)
        far = (got.double() - out).abs() > tolerance.atol + tolerance.rtol * out.abs()
        assert far.float().mean() <= tolerance.outliers if far.numel() else True


def _case(**changes: Any) -> dict[str, Any]:
    base = {
        "q_lens": [3, 1, 6],
        "kv_lens": [20, 33, 6],
        "heads": (4, 2),
        "size": 16,
        "block_size": 16,
        "mode": 3,
        "pre": 5,
        "nxt": 0,
        "flat": False,
        "strided": False,
        "seed": 11,
    }
    return base | changes


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "wrong",
    [{"mode": 0}, {"mode": 4, "pre": 4}, {"mode": 4, "pre": 6}, {"scale": 0.31}],
    ids=str,
)
def test_a_wrong_formula_is_noticed(provider: str, wrong: dict[str, Any]) -> None:
    p = _case(mode=4)
    arguments, rows = paged(p)
    got, _ = ops.fused_infer_attention_score(**arguments, provider=provider)
    out, _ = expected(p, arguments, rows, **wrong)
    assert not torch.allclose(got.double(), out, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_equals_torch_scaled_dot_product_attention(provider: str) -> None:
    arguments, rows = paged(_case(q_lens=[7], kv_lens=[7]))
    query = arguments["query"].transpose(0, 1)[None]
    key, value = (rows[0][n].transpose(0, 1)[None] for n in range(2))
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )[0].transpose(0, 1)
    got, _ = ops.fused_infer_attention_score(**arguments, provider=provider)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_unpaged_keys_take_cumulative_lengths(provider: str) -> None:
    p = _case(kv_lens=[20, 13, 6])
    arguments, rows = paged(p)
    key, value = (torch.cat([r[n] for r in rows]) for n in range(2))
    arguments |= {"key": key, "value": value, "block_table": None, "block_size": 0}
    arguments["actual_seq_lengths_kv"] = [20, 33, 39]
    got, _ = ops.fused_infer_attention_score(**arguments, provider=provider)
    out, _ = expected(p, arguments, rows)
    torch.testing.assert_close(got.double(), out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_many_tiles_equal_one(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, _ = paged(_case(q_lens=[4, 1], kv_lens=[200, 150]))
    whole, whole_lse = ops.fused_infer_attention_score(**arguments, provider=provider)
    for name in ("flash", "tiles"):
        module = importlib.import_module(f"ascend_attn_ops.operators._shared.fused_infer.{name}")
        monkeypatch.setattr(module, "_TILE_ELEMENTS", 1)
    tiled, tiled_lse = ops.fused_infer_attention_score(**arguments, provider=provider)
    torch.testing.assert_close(tiled, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tiled_lse, whole_lse, rtol=1e-6, atol=1e-6)


def test_lse_is_not_computed_unless_asked_for() -> None:
    arguments, _ = paged(_case())
    arguments["softmax_lse_flag"] = False
    for provider in PROVIDERS:
        _, lse = ops.fused_infer_attention_score(**arguments, provider=provider)
        assert lse.shape == (0,)


def test_sanitizer_names_the_bad_block_id() -> None:
    arguments, _ = paged(_case())
    arguments["block_table"][1, 1] = 999
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=r"block_table\[1, 1\] = 999"):
        ops.fused_infer_attention_score(**arguments)


def test_sanitizer_names_a_wrong_template() -> None:
    arguments, _ = paged(_case())
    arguments["atten_mask"] = TEMPLATE.tril()
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match="strictly above the diagonal"):
        ops.fused_infer_attention_score(**arguments)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_any_scale_is_taken_as_it_is(provider: str, factor: float) -> None:
    """A kernel that hides keys before it scales turns -inf into NaN at 0, into +inf below."""
    p = _case(mode=3)
    arguments, rows = paged(p)
    arguments["scale"] = factor
    out, lse = expected(p, arguments, rows, scale=factor)
    got, got_lse = ops.fused_infer_attention_score(**arguments, provider=provider)
    torch.testing.assert_close(got.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_lse[..., 0].double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("mode", [0, 3, 4])
def test_slots_that_no_token_was_written_to_may_hold_nan(provider: str, mode: int) -> None:
    p = _case(mode=mode)
    arguments, rows = paged(p)
    out, _ = expected(p, arguments, rows)
    for request, length in enumerate(p["kv_lens"]):
        last = arguments["block_table"][request, (length - 1) // 16]
        for cache in (arguments["key"], arguments["value"]):
            cache[last, :, (length - 1) % 16 + 1 :] = float("nan")
    got, _ = ops.fused_infer_attention_score(**arguments, provider=provider)
    torch.testing.assert_close(got.double(), out, rtol=1e-5, atol=1e-5)
