from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale

import ascend_attn_ops as ops

PROVIDERS = ("reference", "cpu")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def merged(lse: list[torch.Tensor], out: list[torch.Tensor]) -> tuple[Any, Any]:
    """Float64: shares of exp(lse) in their sum, without any shift."""
    mass = numpy.exp(numpy.stack([part.double().numpy() for part in lse]))
    values = numpy.stack([part.double().numpy() for part in out])
    total = mass.sum(0)
    return numpy.einsum("pr,prd->rd", mass / total, values), numpy.log(total)


@settings(max_examples=scale(700))
@given(
    st.integers(1, 16),
    st.integers(0, 9),
    st.sampled_from([8, 16, 64]),
    st.sampled_from(list(TOLERANCES)),
    st.floats(-40, 40),
    st.integers(0, 2**31),
)
def test_weights_are_the_shares_of_the_parts(
    parts: int, rows: int, size: int, dtype: torch.dtype, shift: float, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    lse = list(torch.randn(parts, rows, generator=rng) * 5 + shift)
    if parts > 1 and rows:
        lse[seed % parts][0] = float("-inf")  # this part has no key for the first row
    out = list(torch.randn(parts, rows, size, generator=rng).to(dtype))
    want, want_lse = merged(lse, out)
    for provider in PROVIDERS:
        found, found_lse = ops.attention_update(lse, out, 1, provider=provider)
        assert found.dtype == dtype
        tolerance = TOLERANCES[dtype]
        numpy.testing.assert_allclose(found.double(), want, rtol=tolerance, atol=tolerance)
        numpy.testing.assert_allclose(found_lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_split_attention_merges_to_torch_sdpa(provider: str) -> None:
    query, (key, value) = torch.randn(6, 32), torch.randn(2, 40, 32)
    lse, out = [], []
    for k, v in zip(key.split([5, 30, 5]), value.split([5, 30, 5]), strict=True):
        scores = query @ k.T * 32**-0.5
        lse.append(scores.logsumexp(-1))
        out.append(scores.softmax(-1) @ v)
    whole = torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None])
    found, _ = ops.attention_update(lse, out, 0, provider=provider)
    torch.testing.assert_close(found, whole[0], rtol=1e-5, atol=1e-5)
    swapped, _ = ops.attention_update([lse[1], lse[0], lse[2]], out, 0, provider=provider)
    assert not torch.allclose(swapped, whole[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "values", [(float("-inf"), float("-inf")), (float("inf"), 0.0), (float("nan"), 0.0)]
)
def test_rows_that_cann_poisons_are_nan_here_too(provider: str, values: tuple[float, ...]) -> None:
    lse = [torch.tensor([value, 1.0]) for value in values]
    out, lse_out = ops.attention_update(lse, [torch.ones(2, 8)] * 2, 1, provider=provider)
    assert bool(out[0].isnan().all())
    assert bool(lse_out[0].isnan())
    assert torch.equal(out[1], torch.ones(8))


def test_our_merge_is_neutral_where_the_operator_is_nan() -> None:
    empty = ops.PartialAttention.empty(1, 2, 8, torch.float32)
    part = ops.merge_partials([empty, empty])
    assert not part.out.any()
    assert bool(part.lse.isneginf().all())


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((float("-inf"), float("-inf")), "row 1 is -inf in all 2 parts"),
        ((0.0, float("inf")), r"lse\[1\]\[1\] = inf"),
    ],
)
def test_sanitizer_names_poisoned_rows(values: tuple[float, float], text: str) -> None:
    lse = [torch.tensor([0.0, value]) for value in values]
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.attention_update(lse, [torch.ones(2, 8)] * 2, 0)
    with ops.sanitize():
        ops.attention_update([torch.tensor([0.0, float("-inf")]), torch.zeros(2)],
                             [torch.ones(2, 8)] * 2, 0)  # fmt: skip


@pytest.mark.parametrize("provider", PROVIDERS)
def test_lse_is_only_given_for_update_type_1(provider: str) -> None:
    lse, out = [torch.randn(3)] * 2, [torch.randn(3, 8)] * 2
    assert not ops.attention_update(lse, out, 0, provider=provider)[1].any()
    assert bool(ops.attention_update(lse, out, 1, provider=provider)[1].all())


def test_opcheck_and_compile() -> None:
    lse, out = [torch.randn(3) for _ in range(2)], [torch.randn(3, 8) for _ in range(2)]
    operator = torch.ops.ascend_attn.attention_update
    torch.library.opcheck(operator, (lse, out, 1))

    def doubled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return operator(lse, [a * 1, b], 1)[0] * 2

    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*out), 2 * ops.attention_update(lse, out, 1)[0])
