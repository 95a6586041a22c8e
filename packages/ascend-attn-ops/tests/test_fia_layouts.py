"""Every layout, cache form, mask, shift, rope, sink, prefix and list against float64 loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fia_calls import Builder
from fia_problems import problems
from hypothesis import given, settings
from hypothesis_scale import scale

import ascend_attn_ops as ops

PROVIDERS = ("reference", "cpu")
OPERATORS = {1: ops.fused_infer_attention_score, 2: ops.fused_infer_attention_score_v2}


@pytest.mark.parametrize("version", [1, 2])
@settings(max_examples=scale(200))
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
