from __future__ import annotations

import struct
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale
from sparse_oracle import sparse_attention
from sparse_problems import Shape, lay_out_keys, lay_out_rows, lengths_and_table, real_rows, shapes

import ascend_attn_ops as ops

PROVIDERS = ("reference", "cpu")
SCALE = 0.05


@attrs.frozen
class Problem:
    """One call: its layout and the per-request tensors behind it."""

    shape: Shape
    heads: int
    block: int
    entries: int
    kind: torch.dtype
    dtype: torch.dtype

    def parts(self) -> dict[str, list[torch.Tensor]]:
        rng, s = self.shape.rng(), self.shape
        parts: dict[str, list[torch.Tensor]] = {"query": [], "latent": [], "rope": []}
        parts |= {"scales": [], "indices": []}
        for q_len, kv_len in zip(s.q_lens, s.kv_lens, strict=True):
            query = torch.randn(q_len, self.heads, 576, generator=rng).to(self.dtype)
            latent = (torch.randn(kv_len, 512, generator=rng) * 40).clamp(-127, 127).round()
            blocks = max(-(-kv_len // self.block), 1)
            index = torch.randint(-1, blocks, (q_len, self.entries), generator=rng)
            parts["query"].append(query)
            parts["latent"].append(latent.to(self.kind))
            parts["rope"].append(torch.randn(kv_len, 64, generator=rng).to(self.dtype))
            parts["scales"].append(torch.rand(kv_len, 4, generator=rng) / 64)
            parts["indices"].append(index.to(torch.int32))
        return parts


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    return Problem(
        draw(shapes(longest=20)),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 1, 4, 16])),
        draw(st.sampled_from([1, 5, 24])),
        draw(st.sampled_from([torch.int8, torch.float8_e4m3fn])),
        draw(st.sampled_from([torch.float16, torch.bfloat16])),
    )


def pack(latent: torch.Tensor, rope: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """One row as the documents draw it, byte by byte."""
    row = bytearray(latent.view(torch.uint8).tolist())
    row += bytes(rope.view(torch.uint8).tolist())
    row += struct.pack("<4f", *scales.tolist())
    assert len(row) == 656
    return torch.tensor(list(row), dtype=torch.uint8)


def packed(p: Problem) -> list[torch.Tensor]:
    parts = p.parts()
    columns = (parts["latent"], parts["rope"], parts["scales"])
    rows = [[pack(*row) for row in zip(*each, strict=True)] for each in zip(*columns, strict=True)]
    empty = torch.zeros(0, 656, dtype=torch.uint8)
    return [torch.stack(each) if each else empty for each in rows]


def call(p: Problem, **changes: Any) -> dict[str, Any]:
    s, parts = p.shape, p.parts()
    key = lay_out_keys(s, packed(p)).view(p.kind)
    return {
        "query": lay_out_rows(s, parts["query"]),
        "key": key,
        "value": key,
        "sparse_indices": lay_out_rows(s, [i[:, None] for i in parts["indices"]], 0),
        "scale_value": SCALE,
        "key_quant_mode": 2,
        "value_quant_mode": 2,
        "sparse_block_size": p.block,
        "attention_mode": 2,
        **lengths_and_table(s, "kv"),
    } | changes


def expected(p: Problem, scale_value: float = SCALE) -> list[torch.Tensor]:
    """Float64 attention over latents that were dequantised and rounded to the query's dtype."""
    answers = []
    for query, latent, rope, scales, index in zip(*p.parts().values(), strict=True):
        tiles = latent.double().view(-1, 4, 128) * scales.double()[..., None]
        nope = tiles.view(-1, 512).to(p.dtype).double()
        out, _, _ = sparse_attention(
            query, torch.cat([nope, rope.double()], -1), nope, index.tolist(),
            scale=scale_value, block=p.block, mode=p.shape.mode, sinks=None,
        )  # fmt: skip
        answers.append(out)
    return answers


def close(rows: torch.Tensor, answer: torch.Tensor, dtype: torch.dtype) -> bool:
    """Every element within the vendor's tolerance, although it allows outliers."""
    tolerance = ops.kv_quant_sparse_flash_attention.tolerances[dtype]
    return torch.allclose(rows.double(), answer, rtol=tolerance.rtol, atol=tolerance.atol)


@settings(max_examples=scale(100))
@given(problems())
def test_providers_equal_the_float64_definition(p: Problem) -> None:
    arguments, want = call(p), expected(p)
    for provider in PROVIDERS:
        out = ops.kv_quant_sparse_flash_attention(**arguments, provider=provider)
        assert out.shape == (*arguments["query"].shape[:-1], 512)
        assert out.dtype == p.dtype
        rows, padding = real_rows(p.shape, out)
        assert not padding.any()
        for row, answer in zip(rows, want, strict=True):
            assert close(row, answer, p.dtype)


@settings(max_examples=scale(100))
@given(problems())
def test_equals_sparse_flash_attention_on_dequantised_keys(p: Problem) -> None:
    arguments, parts = call(p), p.parts()
    latents = [
        (latent.float() * scales.repeat_interleave(128, -1)).to(p.dtype)
        for latent, scales in zip(parts["latent"], parts["scales"], strict=True)
    ]
    key = lay_out_keys(p.shape, latents)
    plain, _, _ = ops.sparse_flash_attention(
        arguments["query"][..., :512], key, key, arguments["sparse_indices"], SCALE,
        query_rope=arguments["query"][..., 512:], key_rope=lay_out_keys(p.shape, parts["rope"]),
        sparse_block_size=p.block, attention_mode=2, **lengths_and_table(p.shape, "kv"),
    )  # fmt: skip
    for provider in PROVIDERS:
        out = ops.kv_quant_sparse_flash_attention(**arguments, provider=provider)
        torch.testing.assert_close(out, plain)


def _fixed(kind: torch.dtype = torch.int8) -> Problem:
    shape = Shape([3, 1], [20, 9], "TND", "PA_BSND", 16, 3, False, 12)
    return Problem(shape, 2, 1, 8, kind, torch.bfloat16)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_wrong_scales_are_noticed(provider: str, kind: torch.dtype) -> None:
    p = _fixed(kind)
    arguments = call(p)
    want = torch.cat(expected(p))
    out = ops.kv_quant_sparse_flash_attention(**arguments, provider=provider)
    assert close(out, want, p.dtype)
    assert not close(out, torch.cat(expected(p, 1.3 * SCALE)), p.dtype)
    swapped = arguments["key"].clone()
    swapped[..., 640:648], swapped[..., 648:656] = (
        arguments["key"][..., 648:656],
        arguments["key"][..., 640:648],
    )
    other = ops.kv_quant_sparse_flash_attention(
        **(arguments | {"key": swapped, "value": swapped}), provider=provider
    )
    assert not close(other, want, p.dtype)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_value_of_its_own_is_read(provider: str) -> None:
    arguments = call(_fixed())
    other = arguments["value"].clone()
    other[..., :512] = -arguments["value"][..., :512]
    plain = ops.kv_quant_sparse_flash_attention(**arguments, provider=provider)
    got = ops.kv_quant_sparse_flash_attention(**(arguments | {"value": other}), provider=provider)
    assert torch.equal(got, -plain)
    assert plain.any()


def test_hifloat8_is_a_gap_of_the_host_not_a_refusal() -> None:
    arguments = call(_fixed())
    rows = arguments["key"].view(torch.uint8)
    indices = torch.full((4, 1, 2048), -1, dtype=torch.int32)
    arguments |= {"key": rows, "value": rows, "sparse_indices": indices}
    arguments |= {"key_dtype": 290, "value_dtype": 290}
    record = ops.kv_quant_sparse_flash_attention.bind(**arguments)
    assert ops.check(ops.kv_quant_sparse_flash_attention, record) == []
    with pytest.raises(ops.NoProviderError, match="hifloat8 rows are not decoded"):
        ops.kv_quant_sparse_flash_attention(**arguments)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_row_addresses_beyond_32_bits(provider: str) -> None:
    """Block 7768 of pages of 276480 bytes begins after byte 2**31 (case 39)."""
    pages = torch.empty(7769, 276480, dtype=torch.int8)  # only the touched pages take memory
    key = pages.as_strided((7769, 16, 1, 656), (276480, 656, 656, 1))
    shape = Shape([1], [16], "TND", "PA_BSND", 16, 3, False, 4)
    arguments = call(Problem(shape, 2, 1, 8, torch.int8, torch.float16))
    key[7768] = arguments["key"][int(arguments["block_table"][0, 0])]
    far = {"key": key, "value": key, "block_table": torch.tensor([[7768]], dtype=torch.int32)}
    want = ops.kv_quant_sparse_flash_attention(**arguments, provider=provider)
    got = ops.kv_quant_sparse_flash_attention(**(arguments | far), provider=provider)
    assert want.any()
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "place", "value", "text"),
    [
        ("actual_seq_lengths_query", (0,), -1, r"value -1 at 0"),
        ("actual_seq_lengths_kv", (1,), 99, r"value 99 at 1, room 32"),
        ("block_table", (1, 0), 400, r"block_table\[1, 0\] = 400"),
        ("sparse_indices", (0, 0, 1), 20, r"row 0, entry 1 = 20 of 20 blocks"),
        ("value", (0, 0, 0, 3), 50, r"first different byte at \[0, 0, 0, 3\]"),
    ],
)
def test_sanitizer_names_the_first_bad_element(
    name: str, place: tuple[int, ...], value: int, text: str
) -> None:
    arguments = call(_fixed()) | {"sparse_indices": torch.zeros(4, 1, 8, dtype=torch.int32)}
    arguments["query"] = arguments["query"][:4]
    with ops.sanitize():
        ops.kv_quant_sparse_flash_attention(**arguments)
    arguments[name] = arguments[name].clone()
    arguments[name][place] = value
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.kv_quant_sparse_flash_attention(**arguments)


def test_opcheck() -> None:
    kwargs = call(_fixed())
    kwargs["value"] = kwargs["key"].clone()
    names = ("query", "key", "value", "sparse_indices", "scale_value")
    names += ("key_quant_mode", "value_quant_mode")
    torch.library.opcheck(
        torch.ops.ascend_attn.kv_quant_sparse_flash_attention,
        tuple(kwargs.pop(name) for name in names),
        kwargs,
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),
    )
