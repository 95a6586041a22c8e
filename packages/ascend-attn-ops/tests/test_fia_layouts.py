"""Every layout, cache form, mask, shift, rope, sink, prefix and list against float64 loops."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from fia_calls import Builder
from fia_problems import problems
from hypothesis import given, settings
from hypothesis_scale import scale

import ascend_attn_ops as ops
from ascend_attn_ops.operators._shared.fused_infer import decode

PROVIDERS = ("reference", "cpu")
OPERATORS = {1: ops.fused_infer_attention_score, 2: ops.fused_infer_attention_score_v2}


@pytest.mark.parametrize("version", [1, 2])
@settings(max_examples=scale(150))
@given(problems())
def test_equals_float64_definition(version: int, p: dict[str, Any]) -> None:
    builder = Builder(p)
    arguments, requests = builder.call(version)
    out, lse = builder.expected(requests)
    for provider in PROVIDERS:
        got, got_lse = OPERATORS[version](**arguments, provider=provider)
        torch.testing.assert_close(got.double(), out, rtol=1e-5, atol=1e-5)
        if requests.sink is None:
            torch.testing.assert_close(got_lse.double(), lse, rtol=1e-5, atol=1e-5)
        else:
            assert got_lse.shape == (0,)


@settings(max_examples=scale(60))
@given(problems())
def test_decode_in_place_equals_float64_definition(p: dict[str, Any]) -> None:
    """The path that reads large float32 blocks where they lie, on small blocks."""
    plain = {"q_lens": [1] * len(p["q_lens"]), "mode": 3, "shift": 0}
    p = p | plain | {"layout": "TND", "form": "BnNBsD", "value_size": p["size"]}
    p |= {"sink": False, "prefix": 0, "list": False, "mask": None}
    builder = Builder(p)
    arguments, requests = builder.call(1)
    out, lse = builder.expected(requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "LARGE_BLOCK", 0)
        got, got_lse = OPERATORS[1](**arguments, provider="cpu")
    torch.testing.assert_close(got.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_lse.double(), lse, rtol=1e-5, atol=1e-5)


BASE = {
    "layout": "BSND", "q_lens": [3, 6], "kv_lens": [20, 33], "heads": (4, 2), "size": 16,
    "value_size": 16, "rope": 16, "form": "BnBsH", "block": 16, "mode": 0, "mask": "each",
    "pre": 4, "next": 8, "shift": 2, "sink": True, "padding": 1, "prefix": 0, "list": False,
    "seed": 3,
}  # fmt: skip


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("wrong", ["hidden", "shift", "sink", "key"])
def test_a_wrong_definition_is_noticed(provider: str, wrong: str) -> None:
    builder = Builder(BASE)
    arguments, requests = builder.call(2)
    got, _ = OPERATORS[2](**arguments, provider=provider)
    out, _ = builder.expected(requests)
    torch.testing.assert_close(got.double(), out, rtol=1e-5, atol=1e-5)
    changed = {
        "hidden": [~part for part in requests.hidden],
        "shift": None,
        "sink": None,
        "key": [key[..., :16] * 1.1 for key in requests.key],
    }[wrong]
    if wrong == "key":
        changed = [
            torch.cat([k, r[..., 16:]], -1) for k, r in zip(changed, requests.key, strict=True)
        ]
    out, _ = builder.expected(attrs.evolve(requests, **{wrong: changed}))
    assert not torch.allclose(got.double(), out, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("version", [1, 2])
def test_opcheck(version: int) -> None:
    arguments, _ = Builder(BASE | {"layout": "BSND_BNSD"}).call(version)
    positional = tuple(arguments.pop(name) for name in ("query", "key", "value"))
    op = getattr(torch.ops.ascend_attn, OPERATORS[version].name)
    torch.library.opcheck(op, positional, arguments)


def test_compiles_whole() -> None:
    arguments, _ = Builder(BASE).call(2)
    query = arguments.pop("query")

    def run(query: torch.Tensor) -> torch.Tensor:
        return torch.ops.ascend_attn.fused_infer_attention_score_v2(query * 1, **arguments)[0] + 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query), run(query))


@pytest.mark.parametrize("layout", ["BSH_NBSD", "BNSD_BSND", "TND_NTD", "NTD_TND", "BSND"])
def test_fake_shapes_are_the_real_ones(layout: str) -> None:
    arguments, _ = Builder(BASE | {"layout": layout, "mode": 3, "mask": None, "shift": 0}).call(1)
    real = OPERATORS[1](**arguments)
    metas = OPERATORS[1].outputs(OPERATORS[1].bind(**arguments))
    assert [(t.shape, t.dtype) for t in real] == [(meta.shape, meta.dtype) for meta in metas]


def test_out_is_filled_and_returned() -> None:
    arguments, _ = Builder(BASE).call(1)
    want = OPERATORS[1](**arguments)
    given_out = [torch.full_like(t, 7.0) for t in want]
    got = OPERATORS[1](**arguments, out=given_out)
    assert [t.data_ptr() for t in got] == [t.data_ptr() for t in given_out]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ops.OpArgumentError, match="attention_out"):
        OPERATORS[1](**arguments, out=[want[0][:, :2], want[1]])


@pytest.mark.parametrize("version", [1, 2])
def test_sanitizer_names_the_bad_block(version: int) -> None:
    arguments, _ = Builder(BASE).call(version)
    arguments["block_table"][1, 0] = 500
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=r"block_table\[1, 0\] = 500"):
        OPERATORS[version](**arguments)


def test_left_padding_takes_the_rows_in_front_of_the_padding() -> None:
    """Start = S - padding - length, as the documents give it; float64 loops over those rows."""
    rng = torch.Generator().manual_seed(1)
    query, key = torch.randn(1, 2, 6, 8, generator=rng), torch.randn(1, 2, 9, 8, generator=rng)
    value = torch.randn(1, 2, 9, 8, generator=rng)
    call = {"num_heads": 2, "input_layout": "BNSD", "scale": 0.3}
    lengths = {"actual_seq_lengths": [3], "actual_seq_lengths_kv": [4]}
    sizes = {"query_padding_size": torch.tensor([1]), "kv_padding_size": torch.tensor([2])}
    for provider in PROVIDERS:
        got, _ = OPERATORS[1](query, key, value, **call, **lengths, **sizes, provider=provider)
        want = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, 2:5], key[:, :, 3:7], value[:, :, 3:7], scale=0.3
        )
        torch.testing.assert_close(got[:, :, 2:5], want, rtol=1e-5, atol=1e-5)
        assert not got[:, :, :2].any()
        assert not got[:, :, 5:].any()
