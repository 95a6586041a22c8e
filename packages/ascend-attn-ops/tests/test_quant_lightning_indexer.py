"""quant_lightning_indexer V1 and V2 against float64 scores of the dequantised tensors."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale
from sparse_oracle import index_scores
from sparse_problems import (
    INT,
    Shape,
    lay_out_keys,
    lay_out_rows,
    lengths_and_table,
    real_rows,
    shapes,
    table,
)

import ascend_attn_ops as ops

PROVIDERS = ("reference", "cpu")
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
KINDS = {"int8": torch.int8, "float8": torch.float8_e4m3fn, "mxfp8": torch.float8_e4m3fn}
SIZE = 128


@attrs.frozen
class Problem:
    """One call: its layout and the per-request tensors behind it."""

    shape: Shape
    heads: int
    count: int
    kind: str
    ratio: int = 1

    def parts(self) -> dict[str, list[torch.Tensor]]:
        """Quantised query and key, their scales as stored, and weights, per request."""
        rng, s = self.shape.rng(), self.shape
        names = ("query", "query_scale", "weights", "key", "key_scale")
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        half = torch.float16 if self.kind == "int8" else torch.float32
        for q_len, kv_len in zip(s.q_lens, s.kv_lens, strict=True):
            for name, rows in (("query", (q_len, self.heads)), ("key", (kv_len,))):
                raw = (torch.randn(*rows, SIZE, generator=rng) * 30).clamp(-127, 127).round()
                parts[name].append(raw.to(KINDS[self.kind]))
                parts[f"{name}_scale"].append(self._scale(rows, rng, half))
            weights = torch.randn(q_len, self.heads, generator=rng).to(half)
            parts["weights"].append(weights)
        return parts

    def _scale(self, rows: Any, rng: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        if self.kind == "mxfp8":
            powers = torch.randint(-6, 1, (*rows, 2, 2), generator=rng)
            return torch.pow(2.0, powers).to(torch.float8_e8m0fnu)
        return (torch.rand(*rows, generator=rng) / 32 + 0.001).to(dtype)

    def scores(self) -> list[torch.Tensor]:
        """Float64 scores of each request on dequantised tensors."""
        parts = self.parts()
        return [
            index_scores(self._wide(q, qs), self._wide(k, ks), w)
            for q, qs, w, k, ks in zip(*parts.values(), strict=True)
        ]

    def _wide(self, raw: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        if self.kind != "mxfp8":
            return raw.double() * stored.double()[..., None]
        groups = raw.double().unflatten(-1, (2, 2, 32)) * stored.double()[..., None]
        return groups.flatten(-3)


@st.composite
def problems(draw: st.DrawFn, kinds: tuple[str, ...]) -> Problem:
    return Problem(
        draw(shapes(longest=24)),
        draw(st.sampled_from([1, 2, 5])),
        draw(st.sampled_from([1, 4, 25])),
        draw(st.sampled_from(kinds)),
        draw(st.sampled_from([1, 2, 4])),
    )


def call_v1(p: Problem, **changes: Any) -> dict[str, Any]:
    s, parts = p.shape, p.parts()
    weights = [
        w.to(torch.float16 if p.kind == "int8" else torch.bfloat16) for w in parts["weights"]
    ]
    return {
        "query": lay_out_rows(s, parts["query"]),
        "key": lay_out_keys(s, parts["key"]),
        "weights": lay_out_rows(s, weights),
        "query_dequant_scale": lay_out_rows(s, parts["query_scale"]),
        "key_dequant_scale": lay_out_keys(s, parts["key_scale"]),
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "sparse_count": p.count,
        **lengths_and_table(s, "key"),
    } | changes


def v1_scores(p: Problem) -> list[torch.Tensor]:
    """bfloat16 weights of the float8 calls, in float64."""
    parts = p.parts()
    kind = torch.float16 if p.kind == "int8" else torch.bfloat16
    return [
        index_scores(p._wide(q, qs), p._wide(k, ks), w.to(kind))
        for q, qs, w, k, ks in zip(*parts.values(), strict=True)
    ]


def check_positions(indices: torch.Tensor, scores: torch.Tensor) -> None:
    """Each key once, best first up to rounding, -1 behind."""
    count = min(len(indices), len(scores))
    front = indices[:count].long()
    assert bool((indices[count:] == -1).all())
    assert len(set(front.tolist())) == count
    assert all(0 <= entry < len(scores) for entry in front.tolist())
    best = scores.sort(descending=True).values[:count]
    torch.testing.assert_close(scores[front], best, rtol=1e-4, atol=1e-3)


@settings(max_examples=scale(130))
@given(problems(kinds=("int8", "float8")))
def test_v1_chooses_the_best_scores_of_the_float64_definition(p: Problem) -> None:
    arguments, scores = call_v1(p), v1_scores(p)
    for provider in PROVIDERS:
        indices = ops.quant_lightning_indexer(**arguments, provider=provider)
        rows, padding = real_rows(p.shape, indices)
        assert bool((padding == -1).all())
        for request, each in zip(rows, scores, strict=True):
            q_len, kv_len = each.shape
            for i in range(q_len):
                seen = kv_len if p.shape.mode == 0 else max(0, kv_len - q_len + i + 1)
                check_positions(request[i, 0], each[i, :seen])


def residuals(p: Problem) -> list[int]:
    return [(p.shape.seed + b) % p.ratio for b in range(len(p.shape.kv_lens))]


def call_v2(p: Problem, **changes: Any) -> dict[str, Any]:
    s, parts = p.shape, p.parts()
    q_tnd, k_tnd = s.layout_query == "TND", s.layout_kv == "TND"
    slots = [n + 1 for n in s.q_lens]  # every request has one unused row behind its own
    padded = [torch.cat([w, w.new_full((1, p.heads), 3)]) for w in parts["weights"]]
    rows = {"q": parts["query"], "q_descale": parts["query_scale"]}
    if q_tnd:
        rows = {name: [_one_more(part) for part in each] for name, each in rows.items()}
        rows["w"] = padded
        laid = {name: torch.cat(each) for name, each in rows.items()}
    else:
        laid = {n: _filled(s, each) for n, each in (rows | {"w": parts["weights"]}).items()}
    return {
        **laid,
        "k": lay_out_keys(s, parts["key"]),
        "k_descale": _keys(s, parts["key_scale"]),
        "topk": p.count,
        "quant_mode": {"float8": 1, "int8": 2, "mxfp8": 3}[p.kind],
        "cu_seqlens_q": _cumulative(slots) if q_tnd else None,
        "cu_seqlens_k": _cumulative(s.kv_lens) if k_tnd else None,
        "seqused_q": torch.tensor(s.q_lens, dtype=INT),
        "seqused_k": None if k_tnd else torch.tensor(s.kv_lens, dtype=INT),
        "cmp_residual_k": torch.tensor(residuals(p), dtype=INT) if _compressed(p) else None,
        "block_table": table(s),
        "layout_q": s.layout_query,
        "layout_k": s.layout_kv.replace("BSND", "BBND") if s.layout_kv[0] == "P" else s.layout_kv,
        "mask_mode": s.mode,
        "cmp_ratio": p.ratio,
        "return_value": 1,
    } | changes


def _compressed(p: Problem) -> bool:
    return p.ratio != 1 and p.shape.mode != 0


def _one_more(part: torch.Tensor) -> torch.Tensor:
    """One further row of ones."""
    more = torch.ones(1, *part.shape[1:]).to(part.dtype)
    return (
        torch.cat([part.view(torch.uint8), more.view(torch.uint8)]).view(part.dtype)
        if (part.element_size() == 1)
        else torch.cat([part, more])
    )


def _filled(s: Shape, parts: list[torch.Tensor]) -> torch.Tensor:
    if parts[0].element_size() > 1:
        return lay_out_rows(s, parts)
    return lay_out_rows(s, [p.view(torch.uint8) for p in parts]).view(parts[0].dtype)


def _keys(s: Shape, parts: list[torch.Tensor]) -> torch.Tensor:
    if parts[0].element_size() > 1:
        return lay_out_keys(s, parts)
    return lay_out_keys(s, [p.view(torch.uint8) for p in parts]).view(parts[0].dtype)


def _cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(INT)


def v2_rows(p: Problem, out: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Real rows and padding rows of each request."""
    if p.shape.layout_query == "TND":
        slots = out.split([n + 1 for n in p.shape.q_lens])
        return [each[:-1] for each in slots], [each[-1:] for each in slots]
    lens = p.shape.q_lens
    return [out[b, :n] for b, n in enumerate(lens)], [out[b, n:] for b, n in enumerate(lens)]


def visible_v2(p: Problem, b: int, i: int) -> int:
    """Keys that a row may see, counted in uncompressed keys one by one."""
    q_len, kv_len = p.shape.q_lens[b], p.shape.kv_lens[b]
    if p.shape.mode == 0:
        return kv_len
    last = kv_len * p.ratio + (residuals(p)[b] if _compressed(p) else 0) - q_len + i
    return sum(1 for j in range(kv_len) if (j + 1) * p.ratio - 1 <= last)


@settings(max_examples=scale(130))
@given(problems(kinds=("int8", "float8", "mxfp8")))
def test_v2_chooses_the_best_scores_of_the_float64_definition(p: Problem) -> None:
    arguments, scores = call_v2(p), p.scores()
    for provider in PROVIDERS:
        indices, values = ops.quant_lightning_indexer_v2(**arguments, provider=provider)
        assert values.dtype == torch.bfloat16
        rows, padding = v2_rows(p, indices)
        value_rows, _ = v2_rows(p, values)
        assert all(bool((each == -1).all()) for each in padding)
        for b, each in enumerate(scores):
            for i in range(each.shape[0]):
                seen = each[i, : visible_v2(p, b, i)]
                check_positions(rows[b][i, 0], seen)
                count = min(p.count, len(seen))
                best = seen.sort(descending=True).values[:count]
                got = value_rows[b][i, 0]
                torch.testing.assert_close(got[:count].double(), best, rtol=2**-7, atol=1e-2)
                assert bool(got[count:].isneginf().all())


def _fixed(kind: str, ratio: int = 1) -> Problem:
    shape = Shape([3, 1], [20, 24], "TND", "PA_BSND", 16, 3, False, 12)
    return Problem(shape, 2, 5, kind, ratio)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_wrong_scales_are_noticed(provider: str) -> None:
    p = _fixed("int8")
    arguments = call_v1(p)
    scale_of_key = arguments["key_dequant_scale"].clone()
    scale_of_key[:, ::2] *= 3
    indices = ops.quant_lightning_indexer(
        **(arguments | {"key_dequant_scale": scale_of_key}), provider=provider
    )
    with pytest.raises(AssertionError):
        check_positions(indices[3, 0], v1_scores(p)[1][0])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_wrong_scale_groups_are_noticed(provider: str) -> None:
    p = _fixed("mxfp8")
    arguments = call_v2(p)
    right, _ = ops.quant_lightning_indexer_v2(**arguments, provider=provider)
    check_positions(right[0, 0], p.scores()[0][0, : visible_v2(p, 0, 0)])
    names = ("q_descale", "k_descale")
    turned = {n: arguments[n].view(torch.uint8).flip(-1).view(arguments[n].dtype) for n in names}
    wrong, _ = ops.quant_lightning_indexer_v2(**(arguments | turned), provider=provider)
    with pytest.raises(AssertionError):
        check_positions(wrong[0, 0], p.scores()[0][0, : visible_v2(p, 0, 0)])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"output_idx_offset": torch.ones(2, dtype=INT)}, "output_idx_offset"),
        ({"candidate_mode": 1}, "candidate blocks"),
    ],
)
def test_what_the_documents_leave_open_is_a_gap_of_the_host(
    changes: dict[str, Any], text: str
) -> None:
    arguments = call_v2(_fixed("int8"), **changes)
    record = ops.quant_lightning_indexer_v2.bind(**arguments)
    assert ops.check(ops.quant_lightning_indexer_v2, record) == []
    with pytest.raises(ops.NoProviderError, match=text):
        ops.quant_lightning_indexer_v2(**arguments)


def test_hifloat8_is_a_gap_of_the_host() -> None:
    arguments = call_v1(_fixed("int8"))
    raw = {name: arguments[name].view(torch.uint8) for name in ("query", "key")}
    with pytest.raises(ops.NoProviderError, match="hifloat8 is not decoded"):
        ops.quant_lightning_indexer(**(arguments | raw), query_dtype=290, key_dtype=290)


@pytest.mark.parametrize(
    ("name", "place", "value", "text"),
    [
        ("cu_seqlens_q", (1,), 7, r"value 7 at 1, room 6"),
        ("seqused_k", (1,), 99, r"value 99 at 1, room 32"),
        ("block_table", (1, 1), 400, r"block_table\[1, 1\] = 400"),
    ],
)
def test_v2_sanitizer_names_the_first_bad_element(
    name: str, place: tuple[int, ...], value: int, text: str
) -> None:
    arguments = call_v2(_fixed("int8"))
    with ops.sanitize():
        ops.quant_lightning_indexer_v2(**arguments)
    arguments[name][place] = value
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.quant_lightning_indexer_v2(**arguments)


def test_v1_sanitizer_names_the_first_bad_element() -> None:
    arguments = call_v1(_fixed("int8"))
    arguments["block_table"][0, 0] = 400
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=r"block_table\[0, 0\] = 400"):
        ops.quant_lightning_indexer(**arguments)


def test_v2_call_of_cann_ops_transformer_is_the_documented_one() -> None:
    arguments = call_v2(_fixed("int8"))
    arguments |= {"metadata": torch.zeros(1024, dtype=INT), "seqused_q": None}
    record = ops.quant_lightning_indexer_v2.bind(**arguments)
    build = ops.quant_lightning_indexer_v2.npu_calls["cann_ops_transformer"]
    call = build(record)
    assert call.function == "quant_lightning_indexer"
    assert call.args[-2:] == (5, 2)
    assert call.kwargs.keys() == {
        "cu_seqlens_q", "seqused_k", "block_table", "metadata", "layout_q", "layout_k", "mask_mode",
        "return_value",
    }  # fmt: skip
    assert call.kwargs["mask_mode"] == 3


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_opcheck(version: str) -> None:
    if version == "v1":
        kwargs, op = call_v1(_fixed("int8")), torch.ops.ascend_attn.quant_lightning_indexer
        names = ("query", "key", "weights", "query_dequant_scale", "key_dequant_scale")
        names += ("query_quant_mode", "key_quant_mode")
    else:
        kwargs, op = call_v2(_fixed("int8", 4)), torch.ops.ascend_attn.quant_lightning_indexer_v2
        names = ("q", "k", "w", "q_descale", "k_descale", "topk", "quant_mode")
    torch.library.opcheck(op, tuple(kwargs.pop(n) for n in names), kwargs, test_utils=CHECKS)
