"""interleave_rope and rotary_position_embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale
from rope_oracle import HALF, INTERLEAVED, angles, rotate, tables

import ascend_attn_ops as ops

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MODES = {"half": HALF, "interleave": INTERLEAVED}


@settings(max_examples=scale(400))
@given(
    st.sampled_from(list(MODES)),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
    st.sampled_from([2, 4, 8, 64, 66]),
    st.sampled_from(list(TOLERANCES)),
    st.integers(0, 2**31),
)
def test_rotary_position_embedding_turns_pairs(
    mode: str, sizes: tuple[int, int, int], size: int, dtype: torch.dtype, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(*sizes, size, generator=rng).to(dtype)  # (B, S, N, D)
    angle = angles(numpy.arange(sizes[1]) + seed % 50, size)[None, :, None]
    cos, sin = tables(angle, MODES[mode], dtype)
    found = ops.rotary_position_embedding(x, cos, sin, mode)
    want = rotate(x, angle, MODES[mode], MODES[mode])
    tolerance = TOLERANCES[dtype]
    assert found.dtype == dtype
    numpy.testing.assert_allclose(found.double(), want, rtol=tolerance, atol=tolerance)


@settings(max_examples=scale(200))
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
    st.booleans(),
    st.sampled_from(list(TOLERANCES)),
    st.integers(0, 2**31),
)
def test_interleave_rope_turns_interleaved_pairs_into_half_order(
    sizes: tuple[int, int, int], one_position: bool, dtype: torch.dtype, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(*sizes, 64, generator=rng).to(dtype)  # (B, N, S, D)
    positions = numpy.arange(sizes[0])[:, None] + numpy.arange(1 if one_position else sizes[2])
    angle = angles(positions, 64)[:, None]
    cos, sin = tables(angle, HALF, dtype)
    want = rotate(x, angle, INTERLEAVED, HALF)
    tolerance = TOLERANCES[dtype]
    found = ops.interleave_rope(x, cos, sin).double()
    numpy.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance)


def test_the_layouts_are_named_and_differ() -> None:
    """Head dimension 4, position 1, vector [1, 2, 3, 4]: every layout has its own answer."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    angle = angles(numpy.ones((1, 1, 1)), 4)
    found = {
        mode: ops.rotary_position_embedding(x, *tables(angle, order, torch.float32), mode)
        for mode, order in MODES.items()
    }
    (c0, c1), (s0, s1) = numpy.cos(angle.flatten()), numpy.sin(angle.flatten())
    half = [c0 - 3 * s0, 2 * c1 - 4 * s1, 3 * c0 + s0, 4 * c1 + 2 * s1]
    pairs = [c0 - 2 * s0, 2 * c0 + s0, 3 * c1 - 4 * s1, 4 * c1 + 3 * s1]
    numpy.testing.assert_allclose(found["half"].flatten(), half, rtol=1e-6)
    numpy.testing.assert_allclose(found["interleave"].flatten(), pairs, rtol=1e-6)
    assert not torch.allclose(found["half"], found["interleave"], atol=0.5)


def test_interleave_rope_is_neither_mode_of_the_other_operator() -> None:
    x = torch.randn(1, 2, 3, 64)
    angle = angles(numpy.arange(3) + 1.0, 64)[None, None]
    cos, sin = tables(angle, HALF, torch.float32)
    to_half = ops.interleave_rope(x, cos, sin)
    half = ops.rotary_position_embedding(x, cos, sin, "half")
    kept = ops.rotary_position_embedding(
        x, *tables(angle, INTERLEAVED, torch.float32), "interleave"
    )
    assert not torch.allclose(to_half, half, atol=0.1)
    assert not torch.allclose(to_half, kept, atol=0.1)
    torch.testing.assert_close(to_half[..., :32], kept[..., 0::2])
    torch.testing.assert_close(to_half[..., 32:], kept[..., 1::2])


@pytest.mark.parametrize("mode", list(MODES))
def test_a_rotate_matrix_replaces_the_mode(mode: str) -> None:
    size = 8
    rotate_by = torch.zeros(size, size)
    for i in range(size // 2):
        first, second = (i, i + size // 2) if mode == "half" else (2 * i, 2 * i + 1)
        rotate_by[second, first], rotate_by[first, second] = -1, 1
    x, cos, sin = torch.randn(2, 3, 4, size), torch.randn(1, 3, 1, size), torch.randn(1, 3, 1, size)
    torch.testing.assert_close(
        ops.rotary_position_embedding(x, cos, sin, mode, rotate_by),
        ops.rotary_position_embedding(x, cos, sin, mode),
    )


def huggingface(name: str, model: str) -> Any:
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, name)


def hugging_case(size: int) -> tuple[torch.Tensor, numpy.ndarray]:
    return torch.randn(2, 3, 5, size), angles(numpy.arange(5.0), size)[None]


def test_half_equals_llama_of_transformers() -> None:
    x, angle = hugging_case(16)
    cos, sin = tables(angle, HALF, torch.float32)
    want, _ = huggingface("apply_rotary_pos_emb", "llama")(x, x, cos, sin)
    found = ops.rotary_position_embedding(x, cos[:, None], sin[:, None], "half")
    torch.testing.assert_close(found, want)


def test_interleave_equals_cohere_of_transformers() -> None:
    x, angle = hugging_case(16)
    cos, sin = tables(angle, INTERLEAVED, torch.float32)
    want, _ = huggingface("apply_rotary_pos_emb", "cohere")(x, x, cos, sin)
    found = ops.rotary_position_embedding(x, cos[:, None], sin[:, None], "interleave")
    torch.testing.assert_close(found, want)


def test_interleave_rope_equals_deepseek_v3_of_transformers() -> None:
    x, angle = hugging_case(64)
    cos, sin = tables(numpy.repeat(angle, 2, 0), HALF, torch.float32)
    want, _ = huggingface("apply_rotary_pos_emb_interleave", "deepseek_v3")(x, x, cos, sin)
    found = ops.interleave_rope(x, cos[:, None], sin[:, None])
    torch.testing.assert_close(found, want)


def test_opcheck() -> None:
    x, cos, sin = torch.randn(2, 3, 4, 64), torch.randn(2, 1, 4, 64), torch.randn(2, 1, 4, 64)
    torch.library.opcheck(torch.ops.ascend_attn.interleave_rope, (x, cos, sin))
    operator = torch.ops.ascend_attn.rotary_position_embedding
    torch.library.opcheck(operator, (x, cos, sin, "interleave"))
    torch.library.opcheck(operator, (x, cos, sin), {"rotate": torch.randn(64, 64)})


def test_the_record_has_the_signature_of_npu_rotary_mul() -> None:
    """The vendor gives the operator another name in torch_npu; its parameters are ours."""
    path = Path(__file__).parent / "data" / "torch_npu_2_13_schemas.json"
    vendor = torch._C.parse_schema(json.loads(path.read_text())["npu_rotary_mul"])
    ours = torch._C.parse_schema(ops.rotary_position_embedding.schema)

    def described(schema: Any) -> list[tuple[str, str, Any]]:
        return [(a.name, str(a.type), a.default_value) for a in schema.arguments]

    assert described(ours) == described(vendor)
