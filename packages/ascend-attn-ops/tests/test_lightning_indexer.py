from __future__ import annotations

import importlib
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale
from sparse_oracle import index_scores, visible
from sparse_problems import Shape, lay_out_keys, lay_out_rows, lengths_and_table, real_rows, shapes

import ascend_attn_ops as ops

PROVIDERS = ("reference", "cpu")


@attrs.frozen
class Problem:
    """One call: its layout and the per-request tensors behind it."""

    shape: Shape
    heads: int
    count: int

    def parts(self, dtype: torch.dtype = torch.float32) -> dict[str, list[torch.Tensor]]:
        rng, s = self.shape.rng(), self.shape

        def rows(lengths: list[int], *tail: int) -> list[torch.Tensor]:
            return [torch.randn(n, *tail, generator=rng).to(dtype) for n in lengths]

        return {
            "query": rows(s.q_lens, self.heads, 16),
            "key": rows(s.kv_lens, 16),
            "weights": rows(s.q_lens, self.heads),
        }


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    heads = draw(st.sampled_from([1, 2, 3, 8]))
    return Problem(draw(shapes()), heads, draw(st.sampled_from([1, 2, 7, 39, 64])))


def call(p: Problem, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    s, parts = p.shape, p.parts(dtype)
    return {
        "query": lay_out_rows(s, parts["query"]),
        "key": lay_out_keys(s, parts["key"]),
        "weights": lay_out_rows(s, parts["weights"]),
        "sparse_count": p.count,
        "return_value": True,
        **lengths_and_table(s, "key"),
    } | changes


def check_choice(
    p: Problem, got: tuple[torch.Tensor, torch.Tensor], scores: list[torch.Tensor], tolerance: float
) -> None:
    """Indices and values of all rows against float64 scores; equal scores may change places."""
    indices, padding = real_rows(p.shape, got[0])
    values, value_padding = real_rows(p.shape, got[1])
    assert bool((padding == -1).all())
    assert bool(value_padding.isneginf().all())
    for b, request_scores in enumerate(scores):
        q_len, kv_len = request_scores.shape
        for i in range(q_len):
            seen = visible(i, q_len, kv_len, p.shape.mode)
            check_row(indices[b][i, 0], values[b][i, 0], request_scores[i, :seen], tolerance)


def check_row(
    index: torch.Tensor, value: torch.Tensor, scores: torch.Tensor, tolerance: float
) -> None:
    count = min(len(index), len(scores))
    front, rest = index[:count].long(), index[count:]
    assert bool((rest == -1).all())
    assert bool(value[count:].isneginf().all())
    assert len(set(front.tolist())) == count
    assert all(0 <= entry < len(scores) for entry in front.tolist())
    best = scores.sort(descending=True).values[:count]
    torch.testing.assert_close(scores[front], best, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(value[:count].double(), best, rtol=tolerance, atol=tolerance)


@settings(max_examples=scale(480))
@given(problems())
def test_providers_choose_the_best_scores_of_the_float64_definition(p: Problem) -> None:
    arguments, parts = call(p), p.parts()
    scores = [index_scores(*each) for each in zip(*parts.values(), strict=True)]
    for provider in PROVIDERS:
        check_choice(p, ops.lightning_indexer(**arguments, provider=provider), scores, 1e-4)


@settings(max_examples=scale(60))
@given(problems(), st.sampled_from([torch.float16, torch.bfloat16]), st.booleans())
def test_half_precision_inputs(p: Problem, dtype: torch.dtype, wide_weights: bool) -> None:
    """Products and sums are float32, so that only the values' last rounding is coarse."""
    arguments, parts = call(p, dtype), p.parts(dtype)
    if wide_weights:
        arguments["weights"] = arguments["weights"].float()
    scores = [index_scores(*each) for each in zip(*parts.values(), strict=True)]
    for provider in PROVIDERS:
        indices, values = ops.lightning_indexer(**arguments, provider=provider)
        assert values.dtype == dtype
        for b, rows in enumerate(real_rows(p.shape, indices)[0]):
            q_len, kv_len = scores[b].shape
            for i in range(q_len):
                seen = scores[b][i, : visible(i, q_len, kv_len, p.shape.mode)]
                chosen = rows[i, 0][rows[i, 0] >= 0].long()
                best = seen.sort(descending=True).values[: len(chosen)]
                assert len(chosen) == min(p.count, len(seen))
                torch.testing.assert_close(seen[chosen], best, rtol=1e-4, atol=1e-4)


def _fixed(**changes: Any) -> Problem:
    shape = {
        "q_lens": [3, 1, 6],
        "kv_lens": [20, 33, 6],
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "block_size": 16,
        "mode": 3,
        "apart": False,
        "seed": 12,
    }
    outer = {"heads": 4, "count": 5}
    outer |= {k: v for k, v in changes.items() if k in outer}
    shape |= {k: v for k, v in changes.items() if k in shape}
    return Problem(Shape(**shape), **outer)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_wrong_formula_is_noticed(provider: str) -> None:
    p = _fixed()
    parts = p.parts()
    got = ops.lightning_indexer(**call(p), provider=provider)
    right = [index_scores(*each) for each in zip(*parts.values(), strict=True)]
    check_choice(p, got, right, 1e-4)
    for wrong in (
        [torch.einsum("qhd,kd,qh->qk", q.double(), k.double(), w.double()) for q, k, w in _rows(p)],
        [index_scores(q, k, torch.ones_like(w)) for q, k, w in _rows(p)],
    ):
        with pytest.raises(AssertionError):
            check_choice(p, got, wrong, 1e-4)
    with pytest.raises(AssertionError):
        check_choice(_fixed(mode=0), got, right, 1e-4)


def _rows(p: Problem) -> Any:
    return zip(*p.parts().values(), strict=True)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_case_42_heads_with_opposite_winners_share_one_choice(provider: str) -> None:
    """Scores are added over heads after the ReLU; no head has a choice of its own."""
    key = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.7, 0.7]]])
    query = torch.tensor([[[1.0, -9.0], [-9.0, 1.0]]])  # head 0 wants key 0, head 1 key 1
    weights = torch.tensor([[1.0, 2.0]])
    lengths = {
        "actual_seq_lengths_query": torch.tensor([1], dtype=torch.int32),
        "actual_seq_lengths_key": torch.tensor([3], dtype=torch.int32),
    }
    indices, values = ops.lightning_indexer(
        query, key, weights, **lengths, layout_query="TND", layout_key="TND", sparse_count=1,
        sparse_mode=0, return_value=True, provider=provider,
    )  # fmt: skip
    assert indices.tolist() == [[[1]]]
    assert values.tolist() == [[[2.0]]]  # without the ReLU key 2 would win: 1 * -5.6 + 2 * -5.6


@pytest.mark.parametrize("provider", PROVIDERS)
def test_equal_scores_may_come_in_any_order_but_each_key_once(provider: str) -> None:
    p = _fixed(q_lens=[2], kv_lens=[30], count=12)
    arguments = call(p)
    arguments["key"] = torch.ones_like(arguments["key"])
    indices, values = ops.lightning_indexer(**arguments, provider=provider)
    for row in indices[:, 0].tolist():
        assert len(set(row)) == 12
    assert torch.equal(values, values[..., :1].expand_as(values))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_without_keys_are_all_minus_one(provider: str) -> None:
    indices, values = ops.lightning_indexer(
        **call(_fixed(q_lens=[5, 2], kv_lens=[2, 0])), provider=provider
    )
    assert bool((indices[[0, 1, 2, 5, 6]] == -1).all())
    assert bool(values[[0, 1, 2, 5, 6]].isneginf().all())
    assert indices[3].tolist() == [[0, -1, -1, -1, -1]]
    assert sorted(indices[4, 0].tolist()) == [-1, -1, -1, 0, 1]


def test_values_are_not_returned_unless_asked_for() -> None:
    for provider in PROVIDERS:
        _, values = ops.lightning_indexer(**call(_fixed(), return_value=False), provider=provider)
        assert values.shape == (0,)


@settings(max_examples=scale(15))
@given(problems())
def test_many_small_tiles_equal_one(p: Problem) -> None:
    arguments = call(p)
    _, whole = ops.lightning_indexer(**arguments, provider="cpu")
    module = importlib.import_module("ascend_attn_ops.operators._shared.top_keys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE_ELEMENTS", 1)
        patch.setattr(module, "SCORE_ELEMENTS", 1)
        _, tiled = ops.lightning_indexer(**arguments, provider="cpu")
    torch.testing.assert_close(tiled, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_block_addresses_beyond_32_bits(provider: str) -> None:
    """Block 7768 of pages of 276480 elements begins after element 2**31 (case 39)."""
    pages = torch.empty(7769, 276480, dtype=torch.float16)  # only the touched pages take memory
    key = pages.as_strided((7769, 16, 1, 16), (276480, 16, 16, 1))
    arguments = call(_fixed(q_lens=[1], kv_lens=[16]), torch.float16)
    key[7768] = arguments["key"][int(arguments["block_table"][0, 0])]
    far = {"key": key, "block_table": torch.tensor([[7768]], dtype=torch.int32)}
    want = ops.lightning_indexer(**arguments, provider=provider)
    got = ops.lightning_indexer(**(arguments | far), provider=provider)
    assert int(want[0].max()) > 0
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_its_choice_feeds_sparse_flash_attention(provider: str) -> None:
    """With k of all keys the sparse attention equals the dense one, whatever the order."""
    p = _fixed(q_lens=[2, 3], kv_lens=[9, 21], count=24)
    arguments = call(p)
    indices, _ = ops.lightning_indexer(**arguments, provider=provider)
    query = torch.cat([arguments["query"], arguments["query"][..., :4]], -1)
    shared = {k: v for k, v in arguments.items() if "query" in k and k != "query"}
    out, _, total = ops.sparse_flash_attention(
        query[..., :16], arguments["key"], arguments["key"], indices, 0.3, **shared,
        block_table=arguments["block_table"], layout_kv="PA_BSND",
        actual_seq_lengths_kv=arguments["actual_seq_lengths_key"], query_rope=query[..., 16:],
        key_rope=torch.zeros_like(arguments["key"][..., :4]), attention_mode=2,
        return_softmax_lse=True, provider=provider,
    )  # fmt: skip
    start = 0
    for q, k, _ in _rows(p):
        causal = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        want = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k[None, None], k[None, None], causal, scale=0.3,
            enable_gqa=True,
        )[0].transpose(0, 1)  # fmt: skip
        torch.testing.assert_close(out[start : start + len(q)], want, rtol=1e-5, atol=1e-5)
        start += len(q)
    assert bool((total[0, :start] >= 1).all())


@pytest.mark.parametrize(
    ("name", "place", "value", "text"),
    [
        ("actual_seq_lengths_query", (1,), 1, r"value 1 after 3 at 1"),
        ("actual_seq_lengths_key", (1,), 99, r"value 99 at 1, room 48"),
        ("block_table", (1, 2), 400, r"block_table\[1, 2\] = 400"),
    ],
)
def test_sanitizer_names_the_first_bad_element(
    name: str, place: tuple[int, ...], value: int, text: str
) -> None:
    arguments = call(_fixed())
    with ops.sanitize():
        ops.lightning_indexer(**arguments)
    arguments[name] = arguments[name].clone()
    arguments[name][place] = value
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.lightning_indexer(**arguments)


@pytest.mark.parametrize("wanted", [True, False])
def test_opcheck(wanted: bool) -> None:
    kwargs = call(_fixed(), return_value=wanted)
    args = tuple(kwargs.pop(name) for name in ("query", "key", "weights"))
    torch.library.opcheck(
        torch.ops.ascend_attn.lightning_indexer,
        args,
        kwargs,
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),
    )


def test_compiles_whole_and_gives_the_same() -> None:
    kwargs = call(_fixed())
    args = tuple(kwargs.pop(name) for name in ("query", "key", "weights"))

    def shifted(query: torch.Tensor) -> torch.Tensor:
        indices, _ = torch.ops.ascend_attn.lightning_indexer(query, *args[1:], **kwargs)
        return indices + 1

    compiled = torch.compile(shifted, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(args[0]), shifted(args[0]))
