from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale

import ascend_attn_ops as ops

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def sides(rows: tuple[int, ...], size: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Two attention results over different keys: scores [.., K], out [.., D]."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for keys in (3, 5):
        scores = torch.randn(*rows, keys, generator=rng) * 4
        value = torch.randn(*rows, keys, size, generator=rng)
        maximum = scores.amax(-1, keepdim=True)
        made.append({
            "scores": scores, "value": value,
            "out": torch.einsum("...k,...kd->...d", scores.softmax(-1), value),
            "max": maximum, "sum": torch.exp(scores - maximum).sum(-1, keepdim=True),
        })  # fmt: skip
    return made


def call(made: list[dict[str, torch.Tensor]], layout: str, dtype: torch.dtype) -> Any:
    """Rows are (B, N, S) or (T, N)."""
    outs = [side["out"] for side in made]
    more: dict[str, Any] = {}
    if layout == "SBH":
        outs = [out.permute(2, 0, 1, 3).flatten(2) for out in outs]
    else:
        more["actual_seq_qlen"] = torch.tensor([0, outs[0].shape[0]])
    prev, cur = (
        (out.to(dtype), side["max"].repeat_interleave(8, -1), side["sum"].repeat_interleave(8, -1))
        for out, side in zip(outs, made, strict=True)
    )
    return ops.ring_attention_update(*prev, *cur, input_layout=layout, **more)


@settings(max_examples=scale(300))
@given(
    st.sampled_from(["SBH", "TND"]),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)),
    st.sampled_from(list(TOLERANCES)),
    st.integers(0, 2**31),
)
def test_merging_equals_attention_over_all_keys_in_float64(
    layout: str, sizes: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> None:
    rows = sizes if layout == "SBH" else sizes[:2]
    made = sides(rows, 8, seed)
    scores = numpy.concatenate([side["scores"].double().numpy() for side in made], -1)
    value = numpy.concatenate([side["value"].double().numpy() for side in made], -2)
    mass = numpy.exp(scores)
    want = numpy.einsum("...k,...kd->...d", mass / mass.sum(-1, keepdims=True), value)
    out, maximum, total = call(made, layout, dtype)
    found = out.double().numpy()
    if layout == "SBH":
        batch, heads, _ = sizes
        found = found.reshape(-1, batch, heads, 8).transpose(1, 2, 0, 3)
    assert out.dtype == dtype
    tolerance = TOLERANCES[dtype]
    numpy.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance)
    lse = (maximum.double() + total.double().log()).numpy()
    lanes = numpy.broadcast_to(numpy.log(mass.sum(-1))[..., None], lse.shape)
    numpy.testing.assert_allclose(lse, lanes, rtol=1e-5, atol=1e-5)
    assert numpy.array_equal(maximum[..., 0].numpy(), scores.max(-1).astype("float32"))


def test_a_wrong_maximum_is_noticed() -> None:
    """Negative control of the oracle."""
    made = sides((2, 2), 8, 0)
    right, *_ = call(made, "TND", torch.float32)
    made[0]["max"] = made[0]["max"] + 1
    wrong, *_ = call(made, "TND", torch.float32)
    assert not torch.allclose(right, wrong, atol=1e-2)


def test_a_side_without_keys_is_neutral_and_two_of_them_are_nan() -> None:
    made = sides((3, 2), 8, 1)
    made[0]["sum"] = torch.zeros_like(made[0]["sum"])
    out, *_ = call(made, "TND", torch.float32)
    torch.testing.assert_close(out, made[1]["out"])
    made[1]["sum"] = torch.zeros_like(made[1]["sum"])
    assert bool(call(made, "TND", torch.float32)[0].isnan().all())
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=r"prev_softmax_sum\[0, 0, 0\]"):
        call(made, "TND", torch.float32)


def test_sanitizer_finds_unequal_lanes_and_bad_prefix_sums() -> None:
    out, softmax = torch.ones(2, 1, 8), torch.ones(2, 1, 8)
    uneven = softmax.clone()
    uneven[1, 0, 3] = 2
    lengths = torch.tensor([0, 2])
    with ops.sanitize():
        with pytest.raises(ops.SanitizerError, match=r"cur_softmax_max\[1, 0, 3\] = 2"):
            ops.ring_attention_update(
                out, softmax, softmax, out, uneven, softmax, actual_seq_qlen=lengths,
                input_layout="TND",
            )  # fmt: skip
        with pytest.raises(ops.SanitizerError, match=r"\[2\] for 2 rows"):
            ops.ring_attention_update(
                out, softmax, softmax, out, softmax, softmax, actual_seq_qlen=lengths[1:],
                input_layout="TND",
            )  # fmt: skip


def test_undocumented_order_of_softmax_rows_is_a_gap_not_a_guess() -> None:
    out, softmax = torch.ones(2, 1, 8), torch.ones(2, 1, 8)
    with pytest.raises(ops.NoProviderError, match="not documented"):
        ops.ring_attention_update(
            out, softmax, softmax, out, softmax, softmax, actual_seq_qlen=torch.tensor([0, 2]),
            input_layout="TND", input_softmax_layout="SBH",
        )  # fmt: skip


def test_opcheck() -> None:
    out, softmax = torch.randn(4, 2, 16), torch.rand(2, 2, 4, 1).repeat(1, 1, 1, 8)
    operator = torch.ops.ascend_attn.ring_attention_update
    torch.library.opcheck(operator, (out, softmax, softmax + 1, out + 1, softmax, softmax + 2))
