"""mla_prolog, versions 2 and 3."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale
from rope_oracle import HALF, INTERLEAVED, angles, rms_norm, rotate, tables
from test_kv_rmsnorm_rope_cache import address

import ascend_attn_ops as ops

UNTOUCHED = 99
BLOCK, BLOCKS = 4, 4
FUSED = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    lead = draw(st.sampled_from([(1,), (5,), (0,), (2, 3), (3, 1)]))
    tokens = int(numpy.prod(lead))
    return {
        "lead": lead,
        "slots": draw(st.permutations(range(BLOCK * BLOCKS)))[:tokens],
        "skip": draw(st.booleans()),
        "hidden": draw(st.sampled_from([16, 48])),
        "low": draw(st.sampled_from([8, 24])),
        "heads": draw(st.integers(1, 3)),
        "size": draw(st.sampled_from([8, 12])),
        "latent": draw(st.sampled_from([32, 64])),
        "rope": 32,
        "mode": draw(st.sampled_from(["PA_BSND", "PA_NZ"])),
        "quant": draw(st.sampled_from([(0, 0, 0), (1, 0, 0), (1, 2, 0), (2, 0, 0), (2, 1, 1)])),
        "smooth": draw(st.booleans()),
        "dtype": draw(st.sampled_from(list(TOLERANCES))),
        "scales": draw(st.sampled_from([(1.0, 1.0), (1.5, 0.5)])),
        "seed": draw(st.integers(0, 2**31)),
    }


def simple(**changes: Any) -> dict[str, Any]:
    return {
        "lead": (2,), "slots": [5, 2], "skip": False, "hidden": 16, "low": 8, "heads": 2, "size": 8,
        "latent": 32, "rope": 32, "mode": "PA_BSND", "quant": (0, 0, 0), "smooth": False,
        "dtype": torch.float32, "scales": (1.0, 1.0), "seed": 0,
    } | changes  # fmt: skip


def build(p: dict[str, Any]) -> tuple[dict[str, Any], numpy.ndarray]:
    """Arguments of version 3 and the angles behind its cos and sin."""
    rng = torch.Generator().manual_seed(p["seed"])
    dtype, (w, k, _) = p["dtype"], p["quant"]
    tokens = int(numpy.prod(p["lead"]))

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    def eight(*shape: int) -> torch.Tensor:
        return torch.randint(-60, 60, shape, generator=rng).to(torch.int8)

    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=rng) * 0.02 + 0.01

    wide, both = p["heads"] * (p["size"] + p["rope"]), p["latent"] + p["rope"]
    whole = eight if w == 2 else real
    angle = angles(numpy.arange(tokens).reshape(p["lead"]) + 3.0, p["rope"])
    cos, sin = tables(angle, HALF, dtype)
    index = torch.tensor(p["slots"], dtype=torch.int64).reshape(p["lead"])
    if p["skip"] and tokens:
        index.view(-1)[0] = -1
    a: dict[str, Any] = {
        "token_x": whole(*p["lead"], p["hidden"]),
        "weight_dq": whole(p["hidden"], p["low"]),
        "weight_uq_qr": (eight if w else real)(p["low"], wide),
        "weight_uk": real(p["heads"], p["size"], p["latent"]),
        "weight_dkv_kr": whole(p["hidden"], both),
        "rmsnorm_gamma_cq": real(p["low"]), "rmsnorm_gamma_ckv": real(p["latent"]),
        "rope_sin": sin, "rope_cos": cos,
        "kv_cache": torch.full((BLOCKS, BLOCK, 1, p["latent"]), UNTOUCHED, dtype=dtype),
        "kr_cache": torch.full((BLOCKS, BLOCK, 1, p["rope"]), UNTOUCHED, dtype=dtype),
        "cache_index": index, "cache_mode": p["mode"],
    }  # fmt: skip
    if w:
        a["dequant_scale_w_uq_qr"] = positive(1, wide)
        a["smooth_scales_cq"] = positive(1, p["low"]) * 50 if p["smooth"] else None
    if w == 2:
        a["dequant_scale_x"] = positive(tokens, 1)
        a["dequant_scale_w_dq"] = positive(1, p["low"])
        a["dequant_scale_w_dkv_kr"] = positive(1, both)
    if k:
        a["kv_cache"] = a["kv_cache"].to(torch.int8)
        a["quant_scale_ckv"] = torch.tensor([20.0]) if k == 1 else positive(1, p["latent"]) * 900
    if k == 2:
        a["kr_cache"] = a["kr_cache"].to(torch.int8)
        a["quant_scale_ckr"] = positive(1, p["rope"]) * 10
    return a, angle


def version_3(p: dict[str, Any]) -> dict[str, Any]:
    names = ("weight_quant_mode", "kv_cache_quant_mode", "query_quant_mode")
    modes = dict(zip(names, p["quant"], strict=True))
    return {
        "qc_qr_scale": p["scales"][0],
        "kc_scale": p["scales"][1],
        "query_norm_flag": True,
    } | modes


def real_value(a: dict[str, Any], weight: str, scale: str) -> numpy.ndarray:
    """A weight as the real matrix it stands for."""
    matrix = a[weight].double().numpy()
    return matrix if a.get(scale) is None else matrix * a[scale].double().numpy()


def want(p: dict[str, Any], a: dict[str, Any], angle: numpy.ndarray) -> dict[str, numpy.ndarray]:
    """Head by head in float64; int8 weights by their real values, c_q rounded where CANN does."""
    x = a["token_x"].double().numpy().reshape(-1, p["hidden"])
    if a.get("dequant_scale_x") is not None:
        x = x * a["dequant_scale_x"].double().numpy()
    low = x @ real_value(a, "weight_dq", "dequant_scale_w_dq")
    low = rms_norm(torch.from_numpy(low), a["rmsnorm_gamma_cq"], 1e-5)
    found = {"query_norm": low}
    if p["quant"][0]:
        smoothed = low if a["smooth_scales_cq"] is None else low * a["smooth_scales_cq"].numpy()
        step = numpy.abs(smoothed).max(-1, keepdims=True) / 127
        found["query_norm"], found["norm_scale"] = numpy.rint(smoothed / step), step
        low = found["query_norm"] * step
    wide = low @ real_value(a, "weight_uq_qr", "dequant_scale_w_uq_qr") * p["scales"][0]
    per_head = p["size"] + p["rope"]
    turn = angle.reshape(-1, angle.shape[-1])
    query, rope = [], []
    for head in range(p["heads"]):
        part = wide[:, head * per_head : (head + 1) * per_head]
        query.append(part[:, : p["size"]] @ a["weight_uk"][head].double().numpy())
        rope.append(rotate(torch.from_numpy(part[:, p["size"] :]), turn, INTERLEAVED, HALF))
    kv = torch.from_numpy(x @ real_value(a, "weight_dkv_kr", "dequant_scale_w_dkv_kr"))
    latent = rms_norm(kv[:, : p["latent"]], a["rmsnorm_gamma_ckv"], 1e-5) * p["scales"][1]
    found["kv_cache"] = latent
    found["kr_cache"] = rotate(kv[:, p["latent"] :], turn, INTERLEAVED, HALF)
    return found | {"query": numpy.stack(query, 1), "query_rope": numpy.stack(rope, 1)}


def close(found: Any, wanted: numpy.ndarray, tolerance: float, slack: float = 0.0) -> None:
    """Relative to the largest element: sums cancel."""
    found = numpy.asarray(found.double()).reshape(wanted.shape)
    size = numpy.abs(wanted).max() if wanted.size else 0.0
    numpy.testing.assert_allclose(found, wanted, rtol=tolerance, atol=slack + tolerance * size)


def check_caches(p: dict[str, Any], a: dict[str, Any], wanted: dict[str, Any]) -> None:
    place_data = {"mode": p["mode"], "block_size": BLOCK}
    for name, scale_name in (("kv_cache", "quant_scale_ckv"), ("kr_cache", "quant_scale_ckr")):
        cache, rows, slack = a[name], wanted[name], 0.0
        if cache.dtype == torch.int8:
            rows = numpy.clip(rows * a[scale_name].double().numpy(), -128, 127)
            slack = 0.5
        memory = numpy.full(cache.numel(), float(UNTOUCHED))
        for row, slot in zip(rows, a["cache_index"].flatten().tolist(), strict=True):
            if slot >= 0:
                memory[address(place_data, cache, slot, rows.shape[-1])] = row
        close(cache.flatten(), memory, TOLERANCES[p["dtype"]], slack)


@settings(max_examples=scale(300))
@given(problems())
def test_version_3_equals_the_float64_formula(p: dict[str, Any]) -> None:
    a, angle = build(p)
    query, rope, scale_q, norm, scale_norm = ops.mla_prolog_v3(**a, **version_3(p))
    wanted = want(p, a, angle)
    # one step of the int8 rounding of c_q may fall either way in the dtype of the inputs
    tolerance = TOLERANCES[p["dtype"]] * (1 if p["quant"][0] == 0 else 5)
    assert query.shape == (*p["lead"], p["heads"], p["latent"])
    assert rope.shape == (*p["lead"], p["heads"], p["rope"])
    if p["quant"][2]:
        assert query.dtype == torch.int8
        assert not query.numel() or int(query.abs().max()) == 127
        flat = query.reshape(-1, p["heads"], p["latent"]).double() * scale_q
        close(flat, wanted["query"], max(tolerance, 0.5 / 127 + 2e-3))
    else:
        assert query.dtype == p["dtype"]
        assert scale_q.shape == (0,)
        close(query, wanted["query"], tolerance)
    close(rope, wanted["query_rope"], tolerance)
    assert norm.dtype == a["weight_uq_qr"].dtype
    close(norm, wanted["query_norm"], TOLERANCES[p["dtype"]], 1.0 if p["quant"][0] else 0.0)
    if p["quant"][0]:
        close(scale_norm, wanted["norm_scale"], TOLERANCES[p["dtype"]])
    check_caches(p, a, wanted)


@settings(max_examples=scale(60))
@given(problems())
def test_version_2_reads_the_quantisation_from_the_dtypes(p: dict[str, Any]) -> None:
    p = p | {"scales": (1.0, 1.0)}
    first, _ = build(p)
    second, _ = build(p)
    query, rope, scale_q, *_ = ops.mla_prolog_v3(**first, **version_3(p))
    query_2, rope_2, kv_cache, kr_cache, scale_2 = ops.mla_prolog_v2(**second)
    assert torch.equal(query, query_2)
    assert torch.equal(rope, rope_2)
    assert kv_cache is second["kv_cache"]
    assert kr_cache is second["kr_cache"]
    assert torch.equal(kv_cache, first["kv_cache"])
    assert torch.equal(kr_cache, first["kr_cache"])
    assert torch.equal(scale_2, scale_q if p["quant"][2] else torch.zeros(1))


def test_exchanged_sin_and_cos_are_noticed() -> None:
    """Negative control of the oracle: sin comes first in this operator."""
    p = simple()
    a, angle = build(p)
    wanted = want(p, a, angle)
    a["rope_sin"], a["rope_cos"] = a["rope_cos"], a["rope_sin"]
    _, rope, *_ = ops.mla_prolog_v3(**a)
    with pytest.raises(AssertionError):
        close(rope, wanted["query_rope"], 0.1)


def test_unpaged_cache_and_empty_cache() -> None:
    p = simple()
    paged, _ = build(p)
    query, *_ = ops.mla_prolog_v3(**paged)
    for mode, shape in (("TND", (2, 1)), ("PA_BSND", (0, 4, 1))):
        a, _ = build(p)
        a |= {"kv_cache": torch.zeros(*shape, 32), "kr_cache": torch.zeros(*shape, 32)}
        a |= {"cache_mode": mode, "cache_index": a["cache_index"] if mode != "TND" else None}
        found, *_ = ops.mla_prolog_v3(**a)
        assert torch.equal(found, query)
        if mode == "TND":
            rows = paged["kv_cache"].view(-1, 1, 32)[[5, 2]]
            assert torch.equal(a["kv_cache"], rows)


def test_query_norm_is_only_given_when_asked_for() -> None:
    a, _ = build(simple())
    assert ops.mla_prolog_v3(**a)[3].shape == (0,)
    assert ops.mla_prolog_v3(**a, query_norm_flag=True)[3].shape == (2, 8)


@pytest.mark.parametrize("op", ["mla_prolog_v2", "mla_prolog_v3"])
@pytest.mark.parametrize(
    ("slots", "text"), [([16, 2], r"cache_index\[0\] = 16 of 16"), ([2, 2], "slot 2 2 times")]
)
def test_sanitizer_names_bad_slots(op: str, slots: list[int], text: str) -> None:
    a, _ = build(simple(slots=slots))
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        getattr(ops, op)(**a)


def test_sanitizer_asks_for_the_format_of_npu_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an NPU tensor has a format: stand in for torch_npu's answer."""
    rules = "ascend_attn_ops.operators.mla_prolog_v3.rules.storage_format"
    a, _ = build(simple())
    with ops.sanitize():
        ops.mla_prolog_v3(**a)  # host tensors: nothing to say
        monkeypatch.setattr(rules, lambda weight: 29)
        ops.mla_prolog_v3(**a)
        monkeypatch.setattr(rules, lambda weight: 2)
        with pytest.raises(ops.SanitizerError, match=r"weight_dq: found format 2"):
            ops.mla_prolog_v3(**a)
        with pytest.raises(ops.SanitizerError, match=r"weight_dq: found format 2"):
            ops.mla_prolog_v2(**a)


def test_modes_without_a_host_formula_are_gaps() -> None:
    a, _ = build(simple())
    lengths = torch.tensor([1, 2], dtype=torch.int32)
    with pytest.raises(ops.NoProviderError, match="not documented"):
        ops.mla_prolog_v3(**a | {"cache_mode": "PA_BLK_BSND"}, actual_seq_len=lengths)


def test_opcheck_and_compile() -> None:
    a, _ = build(simple(quant=(2, 1, 1)))
    torch.library.opcheck(torch.ops.ascend_attn.mla_prolog_v2, (), a)
    a, _ = build(simple())
    torch.library.opcheck(torch.ops.ascend_attn.mla_prolog_v3, (), a | {"query_norm_flag": True})
    fresh, _ = build(simple())

    def query(x: torch.Tensor) -> torch.Tensor:
        found, *_ = torch.ops.ascend_attn.mla_prolog_v3(x * 1, **rest)
        return found * 2

    rest = {name: value for name, value in fresh.items() if name != "token_x"}
    compiled = torch.compile(query, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(fresh["token_x"]), query(fresh["token_x"]))


def test_scores_equal_the_modules_of_deepseek_v3_in_transformers() -> None:
    """Absorbed scores, query . latent + rope . rope, are HF's q . k of the full heads."""
    name = "transformers.models.deepseek_v3"
    config_module = pytest.importorskip(f"{name}.configuration_deepseek_v3")
    module = pytest.importorskip(f"{name}.modeling_deepseek_v3")
    heads, size, rope, latent, tokens = 3, 8, 32, 64, 5
    config = config_module.DeepseekV3Config(
        hidden_size=48, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=24,
        kv_lora_rank=latent, qk_rope_head_dim=rope, qk_nope_head_dim=size, v_head_dim=16,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    layer = module.DeepseekV3Attention(config, 0).eval().requires_grad_(False)
    x = torch.randn(1, tokens, 48)
    cos, sin = tables(angles(numpy.arange(tokens)[None] + 1.0, rope), HALF, torch.float32)
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).view(1, tokens, heads, -1)
    q_nope, q_rope = q.transpose(1, 2).split([size, rope], -1)
    compressed, k_rope = layer.kv_a_proj_with_mqa(x).split([latent, rope], -1)
    kv = layer.kv_b_proj(layer.kv_a_layernorm(compressed)).view(1, tokens, heads, -1)
    k_nope = kv.transpose(1, 2)[..., :size]
    turn = module.apply_rotary_pos_emb_interleave
    q_rope, k_rope = turn(q_rope, k_rope[:, None], cos, sin)
    want_scores = q_nope @ k_nope.mT + q_rope @ k_rope.mT

    kv_cache, kr_cache = torch.zeros(2, 16, 1, latent), torch.zeros(2, 16, 1, rope)
    query, query_rope, *_ = ops.mla_prolog_v3(
        x[0], layer.q_a_proj.weight.T, layer.q_b_proj.weight.T,
        layer.kv_b_proj.weight.view(heads, size + 16, latent)[:, :size],
        layer.kv_a_proj_with_mqa.weight.T, layer.q_a_layernorm.weight,
        layer.kv_a_layernorm.weight, sin[0], cos[0], kv_cache, kr_cache,
        cache_index=torch.arange(tokens) + 7,
        rmsnorm_epsilon_cq=layer.q_a_layernorm.variance_epsilon,
        rmsnorm_epsilon_ckv=layer.kv_a_layernorm.variance_epsilon,
    )  # fmt: skip
    keys, rotary = (cache.flatten(0, 2)[7 : 7 + tokens] for cache in (kv_cache, kr_cache))
    scores = torch.einsum("tnc,sc->nts", query, keys)
    scores += torch.einsum("tnr,sr->nts", query_rope, rotary)
    torch.testing.assert_close(scores, want_scores[0], rtol=1e-4, atol=1e-4)
    assert want_scores.abs().max() > 0.01
