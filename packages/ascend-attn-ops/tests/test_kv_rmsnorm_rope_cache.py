"""kv_rmsnorm_rope_cache, versions 1 and 2."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale
from rope_oracle import HALF, INTERLEAVED, angles, rms_norm, rotate, tables

import ascend_attn_ops as ops

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
UNTOUCHED = 99.0
MODES = ["Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"]


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    mode = draw(st.sampled_from(MODES))
    block_size = (
        draw(st.sampled_from([2, 4])) if mode != "Norm" else tokens + draw(st.integers(0, 3))
    )
    pages = -(-tokens // block_size)
    blocks = batch * pages + draw(st.integers(0, 2))
    if mode == "Norm":
        places = [draw(st.permutations(range(block_size)))[:tokens] for _ in range(batch)]
    elif mode.startswith("PA_BLK"):
        first = draw(st.permutations(range(blocks)))[: batch * pages]
        places = [block * block_size for block in first]
    else:
        places = draw(st.permutations(range(blocks * block_size)))[: batch * tokens]
    return {
        "batch": batch, "tokens": tokens, "mode": mode, "places": places, "blocks": blocks,
        "block_size": block_size, "sizes": draw(st.sampled_from([(32, 64), (64, 512)])),
        "dtype": draw(st.sampled_from(list(TOLERANCES))), "quantised": draw(st.booleans()),
        "skip": draw(st.booleans()), "outputs": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }  # fmt: skip


def build(p: dict[str, Any]) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(p["seed"])
    rope, latent = p["sizes"]
    batch, tokens = p["batch"], p["tokens"]
    angle = angles(numpy.arange(batch)[:, None] * 7 + numpy.arange(tokens), rope)[:, None]
    cos, sin = tables(angle, HALF, p["dtype"])
    index = torch.tensor(p["places"], dtype=torch.int64)
    if p["skip"]:
        index.view(-1)[0] = -1
    lead = (batch, 1, p["block_size"]) if p["mode"] == "Norm" else (p["blocks"], p["block_size"], 1)
    cache_dtype = torch.int8 if p["quantised"] else p["dtype"]
    scales: dict[str, Any] = {}
    if p["quantised"]:
        names = {"k_rope_scale": rope, "c_kv_scale": latent}
        scales = {name: torch.rand(size, generator=rng) * 60 for name, size in names.items()}
    return {
        "kv": torch.randn(batch, 1, tokens, latent + rope, generator=rng).to(p["dtype"]),
        "gamma": torch.randn(latent, generator=rng).to(p["dtype"]),
        "cos": cos, "sin": sin, "index": index,
        "k_cache": torch.full((*lead, rope), UNTOUCHED, dtype=cache_dtype),
        "ckv_cache": torch.full((*lead, latent), UNTOUCHED, dtype=cache_dtype),
        "cache_mode": p["mode"], "is_output_kv": p["outputs"], **scales, "angle": angle,
    }  # fmt: skip


def slot(p: dict[str, Any], index: torch.Tensor, row: int, token: int) -> int | None:
    """Block * block_size + offset of a token, or None."""
    bs = p["block_size"]
    if p["mode"] == "Norm":
        place = int(index[row, token])
        return None if place < 0 else row * bs + place
    if not p["mode"].startswith("PA_BLK"):
        place = int(index[row * p["tokens"] + token])
        return None if place < 0 else place
    pages = -(-p["tokens"] // bs)
    start = int(index[row * pages + token // bs])
    return None if start < 0 else start + token % bs


def address(p: dict[str, Any], cache: torch.Tensor, place: int, size: int) -> numpy.ndarray:
    """Position in the cache's memory of each element of a row."""
    element = numpy.arange(size)
    if not p["mode"].endswith("NZ"):
        return place * size + element
    inner, bs = 32 // cache.element_size(), p["block_size"]
    block, offset = divmod(place, bs)
    return block * bs * size + (element // inner) * bs * inner + offset * inner + element % inner


def expected_memory(
    p: dict[str, Any], a: dict[str, Any], name: str, rows: numpy.ndarray
) -> numpy.ndarray:
    cache = a[name]
    memory = numpy.full(cache.numel(), UNTOUCHED)
    for row in range(p["batch"]):
        for token in range(p["tokens"]):
            place = slot(p, a["index"], row, token)
            if place is not None:
                memory[address(p, cache, place, rows.shape[-1])] = rows[row, 0, token]
    return memory


def rows_in_float64(p: dict[str, Any], a: dict[str, Any]) -> dict[str, numpy.ndarray]:
    latent = p["sizes"][1]
    return {
        "k_cache": rotate(a["kv"][..., latent:], a["angle"], INTERLEAVED, HALF),
        "ckv_cache": rms_norm(a["kv"][..., :latent], a["gamma"], 1e-5),
    }


@settings(max_examples=scale(400))
@given(problems())
def test_caches_and_outputs_equal_the_float64_formula(p: dict[str, Any]) -> None:
    a = build(p)
    rows = rows_in_float64(p, a)
    passed = {name: value for name, value in a.items() if name != "angle"}
    k_cache, ckv_cache, k_embed, y = ops.kv_rmsnorm_rope_cache(**passed)
    assert k_cache is a["k_cache"]
    assert ckv_cache is a["ckv_cache"]
    tolerance = TOLERANCES[p["dtype"]]
    for name, scale_name in (("k_cache", "k_rope_scale"), ("ckv_cache", "c_kv_scale")):
        found = a[name].flatten().double().numpy()
        if p["quantised"]:  # half a unit from rounding, the rest from the dtype of the inputs
            scaled = numpy.clip(rows[name] * a[scale_name].double().numpy(), -128, 127)
            want = expected_memory(p, a, name, scaled)
            slack = 0.5 + 60 * tolerance
            numpy.testing.assert_allclose(found, want, rtol=tolerance, atol=slack)
        else:
            want = expected_memory(p, a, name, rows[name])
            numpy.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance)
    if p["outputs"] and p["mode"] != "Norm":
        for out, name in ((k_embed, "k_cache"), (y, "ckv_cache")):
            numpy.testing.assert_allclose(out.double(), rows[name], rtol=tolerance, atol=tolerance)
    else:
        assert not k_embed.any()
        assert not y.any()


@settings(max_examples=scale(30))
@given(problems())
def test_version_2_writes_the_same_and_returns_only_the_outputs(p: dict[str, Any]) -> None:
    first, second = build(p), build(p)
    del first["angle"], second["angle"]
    *_, k_embed, y = ops.kv_rmsnorm_rope_cache(**first)
    k_embed_2, y_2 = ops.kv_rmsnorm_rope_cache_v2(**second)
    assert torch.equal(k_embed, k_embed_2)
    assert torch.equal(y, y_2)
    for name in ("k_cache", "ckv_cache"):
        assert torch.equal(first[name], second[name])


def simple(**changes: Any) -> dict[str, Any]:
    p = {
        "batch": 2, "tokens": 1, "mode": "PA", "places": [5, 2], "blocks": 2, "block_size": 4,
        "sizes": (64, 512), "dtype": torch.float32, "quantised": False, "skip": False,
        "outputs": True, "seed": 0,
    } | changes  # fmt: skip
    made = build(p)
    del made["angle"]
    return made


def test_the_other_rotary_layout_is_noticed() -> None:
    """Negative control of the oracle."""
    p: dict[str, Any] = {"sizes": (64, 512)}
    a = simple()
    *_, k_embed, _ = ops.kv_rmsnorm_rope_cache(**a)
    angle = angles(numpy.arange(2)[:, None] * 7.0, 64)[:, None]
    rope = a["kv"][..., p["sizes"][1] :]
    right = rotate(rope, angle, INTERLEAVED, HALF)
    numpy.testing.assert_allclose(k_embed, right, rtol=1e-5, atol=1e-5)
    for order in ((HALF, HALF), (INTERLEAVED, INTERLEAVED)):
        assert not numpy.allclose(k_embed, rotate(rope, angle, *order), atol=0.1)


def test_equals_the_modules_of_deepseek_v3_in_transformers() -> None:
    name = "transformers.models.deepseek_v3.modeling_deepseek_v3"
    module = pytest.importorskip(name)
    a = simple(tokens=3, places=[5, 2, 0, 1, 3, 7])
    norm = module.DeepseekV3RMSNorm(512, eps=1e-5)
    norm.weight.data = a["gamma"]
    latent, rope = a["kv"].split([512, 64], -1)
    with torch.no_grad():
        want = norm(latent)
    cos, sin = a["cos"][:, 0], a["sin"][:, 0]
    _, rotated = module.apply_rotary_pos_emb_interleave(rope, rope, cos, sin)
    *_, k_embed, y = ops.kv_rmsnorm_rope_cache(**a)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(k_embed, rotated)


def test_int8_rounds_to_nearest_even_and_saturates() -> None:
    a = simple(quantised=True, batch=1, places=[0])
    a["kv"] = torch.zeros_like(a["kv"])
    a["kv"][..., 512:516] = torch.tensor([0.5, 1.5, 2.5, 200.0])
    a["cos"], a["sin"] = torch.ones_like(a["cos"]), torch.zeros_like(a["sin"])
    a["k_rope_scale"] = torch.ones(64)
    ops.kv_rmsnorm_rope_cache(**a)
    row = a["k_cache"][0, 0, 0]
    assert row[[0, 32, 1, 33]].tolist() == [0, 2, 2, 127]  # half order of the four


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"places": [8, 2]}, "token 0 at 8 of 8"),
        ({"places": [2, 2]}, "slot 2 2 times"),
        ({"mode": "Norm", "places": [[1], [4]]}, "token 1 at 4 of 4"),
        ({"mode": "PA_BLK_BNSD", "tokens": 2, "places": [0, 7]}, "token 3 at 8 of 8"),
    ],
)
def test_sanitizer_names_bad_positions(changes: dict[str, Any], text: str) -> None:
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.kv_rmsnorm_rope_cache(**simple(**changes))


def test_sanitizer_accepts_skipped_tokens() -> None:
    with ops.sanitize():
        ops.kv_rmsnorm_rope_cache(**simple(places=[-1, -1]))


def test_undocumented_variants_are_gaps() -> None:
    with pytest.raises(ops.NoProviderError, match="not documented"):
        ops.kv_rmsnorm_rope_cache(**simple(), v=torch.zeros(2, 1, 1, 128))
    with pytest.raises(ops.NoProviderError, match="torch lacks"):
        ops.kv_rmsnorm_rope_cache_v2(**simple(), k_cache_dtype=290)


def test_opcheck_and_compile() -> None:
    a = simple()
    named = {name: a.pop(name) for name in ("cache_mode", "is_output_kv")}
    for operator in (
        torch.ops.ascend_attn.kv_rmsnorm_rope_cache,
        torch.ops.ascend_attn.kv_rmsnorm_rope_cache_v2,
    ):
        torch.library.opcheck(operator, tuple(a.values()), named)
    fresh = simple()
    k_cache, ckv_cache, *_ = torch.ops.ascend_attn.kv_rmsnorm_rope_cache(**fresh)
    assert torch.equal(k_cache, fresh["k_cache"])  # a copy of the updated cache
    assert k_cache.data_ptr() != fresh["k_cache"].data_ptr()
    assert ckv_cache.shape == fresh["ckv_cache"].shape

    def write(kv: torch.Tensor, k_cache: torch.Tensor, ckv_cache: torch.Tensor) -> torch.Tensor:
        rest = {n: a[n] for n in ("gamma", "cos", "sin", "index")}
        _, y = torch.ops.ascend_attn.kv_rmsnorm_rope_cache_v2(
            kv * 1, k_cache=k_cache, ckv_cache=ckv_cache, **rest, **named
        )
        return y + k_cache.sum()

    caches = [torch.zeros_like(a[name]) for name in ("k_cache", "ckv_cache")]
    again = [cache.clone() for cache in caches]
    compiled = torch.compile(write, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a["kv"], *caches), write(a["kv"], *again))
    assert torch.equal(caches[0], again[0])
    assert bool(again[0].any())
