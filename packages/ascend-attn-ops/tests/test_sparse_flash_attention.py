from __future__ import annotations

import importlib
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
SCALE = 0.21


@attrs.frozen
class Problem:
    """One call: its layout and the per-request tensors behind it."""

    shape: Shape
    heads: int
    block: int
    entries: int
    sinks: bool

    def parts(self, dtype: torch.dtype = torch.float32) -> dict[str, list[torch.Tensor]]:
        rng = self.shape.rng()

        def rows(lengths: list[int], *tail: int) -> list[torch.Tensor]:
            return [torch.randn(n, *tail, generator=rng).to(dtype) for n in lengths]

        s = self.shape
        return {
            "query": rows(s.q_lens, self.heads, 16),
            "query_rope": rows(s.q_lens, self.heads, 4),
            "key": rows(s.kv_lens, 16),
            "key_rope": rows(s.kv_lens, 4),
            "indices": [self._indices(q, k, rng) for q, k in zip(s.q_lens, s.kv_lens, strict=True)],
        }

    def _indices(self, q_len: int, kv_len: int, rng: torch.Generator) -> torch.Tensor:
        """Legal blocks, a few repeated or out of range, and -1 from a random place on."""
        blocks = max(-(-kv_len // self.block), 1)
        index = torch.randint(0, blocks, (q_len, self.entries), generator=rng)
        odd = torch.rand(index.shape, generator=rng)
        index[odd < 0.05] = blocks + 3
        index[odd > 0.97] = -5
        end = torch.randint(0, 2 * self.entries + 1, (q_len, 1), generator=rng)
        index[torch.arange(self.entries) == end] = -1
        return index.to(torch.int32)

    def sink_values(self) -> torch.Tensor | None:
        return torch.linspace(-1, 2, self.heads) if self.sinks else None


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    return Problem(
        draw(shapes()),
        draw(st.sampled_from([1, 2, 3, 8])),
        draw(st.sampled_from([1, 1, 2, 8, 16])),
        draw(st.sampled_from([1, 2, 7, 30, 60])),
        draw(st.booleans()),
    )


def call(p: Problem, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    s, parts = p.shape, p.parts(dtype)
    key = lay_out_keys(s, parts["key"])
    return {
        "query": lay_out_rows(s, parts["query"]),
        "key": key,
        "value": key,
        "sparse_indices": lay_out_rows(s, [i[:, None] for i in parts["indices"]], 0),
        "scale_value": SCALE,
        "query_rope": lay_out_rows(s, parts["query_rope"]),
        "key_rope": lay_out_keys(s, parts["key_rope"]),
        "sparse_block_size": p.block,
        "attention_mode": 2,
        "return_softmax_lse": True,
        "sinks": p.sink_values(),
        **lengths_and_table(s, "kv"),
    } | changes


def expected(p: Problem, dtype: torch.dtype = torch.float32, **changes: Any) -> list[Any]:
    """Per request (out, maximum, sum) by the float64 definition."""
    parts = p.parts(dtype)
    options = {"scale": SCALE, "block": p.block, "mode": p.shape.mode, "sinks": p.sink_values()}
    return [
        sparse_attention(
            torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1), k, index.tolist(),
            **(options | changes),
        )
        for q, q_rope, k, k_rope, index in zip(*parts.values(), strict=True)
    ]  # fmt: skip


def statistics(p: Problem, tensor: torch.Tensor) -> torch.Tensor:
    """(B, 1, S, N) or (1, T, N) to the row order of the query."""
    assert tensor.shape[-3] == 1 if p.shape.layout_query == "BSND" else tensor.shape[0] == 1
    return tensor[:, 0] if p.shape.layout_query == "BSND" else tensor[0]


@settings(max_examples=scale(560))
@given(problems())
def test_providers_equal_the_float64_definition(p: Problem) -> None:
    arguments, want = call(p), expected(p)
    for provider in PROVIDERS:
        got = ops.sparse_flash_attention(**arguments, provider=provider)
        for number, tensor in enumerate((got[0], *(statistics(p, t) for t in got[1:]))):
            rows, padding = real_rows(p.shape, tensor)
            for row, answer in zip(rows, want, strict=True):
                torch.testing.assert_close(row.double(), answer[number], rtol=1e-5, atol=1e-5)
            assert not padding.any()


@settings(max_examples=scale(60))
@given(problems(), st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_is_within_the_vendor_tolerance(p: Problem, dtype: torch.dtype) -> None:
    arguments, want = call(p, dtype), expected(p, dtype)
    tolerance = ops.sparse_flash_attention.tolerances[dtype]
    for provider in PROVIDERS:
        out, _, _ = ops.sparse_flash_attention(**arguments, provider=provider)
        assert out.dtype == dtype
        for rows, (answer, _, _) in zip(real_rows(p.shape, out)[0], want, strict=True):
            far = (rows.double() - answer).abs() > tolerance.atol + tolerance.rtol * answer.abs()
            assert int(far.sum()) <= tolerance.outliers * far.numel()


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
    outer = {"heads": 4, "block": 1, "entries": 12, "sinks": False}
    outer |= {k: v for k, v in changes.items() if k in outer}
    shape |= {k: v for k, v in changes.items() if k in shape}
    return Problem(Shape(**shape), **outer)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("wrong", [{"mode": 0}, {"block": 2}, {"scale": 0.22}], ids=str)
def test_a_wrong_formula_is_noticed(provider: str, wrong: dict[str, Any]) -> None:
    p = _fixed()
    out, _, _ = ops.sparse_flash_attention(**call(p), provider=provider)
    want = torch.cat([answer[0] for answer in expected(p, **wrong)])
    assert not torch.allclose(out.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_all_keys_selected_equals_torch_scaled_dot_product_attention(provider: str) -> None:
    p = _fixed(q_lens=[5], kv_lens=[9], entries=9)
    parts, arguments = p.parts(), call(p)
    arguments["sparse_indices"] = torch.arange(9, dtype=torch.int32).expand(5, 1, 9)
    query = torch.cat([parts["query"][0], parts["query_rope"][0]], -1).transpose(0, 1)
    key = torch.cat([parts["key"][0], parts["key_rope"][0]], -1)
    causal = torch.ones(5, 9, dtype=torch.bool).tril(4)
    want = torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None, None], parts["key"][0][None, None], causal,
        scale=SCALE, enable_gqa=True,
    )[0].transpose(0, 1)  # fmt: skip
    out, _, _ = ops.sparse_flash_attention(**arguments, provider=provider)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def _one_row(indices: list[int], kv_len: int = 40, **changes: Any) -> Any:
    """Outputs of one decode row with these indices, by both providers (they must agree)."""
    p = _fixed(q_lens=[1], kv_lens=[kv_len], seed=4)
    arguments = call(p) | {"sparse_indices": torch.tensor([[indices]], dtype=torch.int32)} | changes
    results = [ops.sparse_flash_attention(**arguments, provider=name) for name in PROVIDERS]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    return results[0]


def test_reading_stops_at_the_first_minus_one() -> None:
    for one, other in zip(_one_row([5, -1, 7]), _one_row([5, -1, -1]), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(_one_row([5, 7, -1])[0], _one_row([5, -1, 7])[0])


def test_a_repeated_index_counts_twice() -> None:
    _, _, once = _one_row([5])
    _, _, twice = _one_row([5, 5])
    assert torch.equal(twice, 2 * once)
    assert not torch.equal(_one_row([5, 5, 9])[0], _one_row([5, 9])[0])


def test_an_index_out_of_range_is_skipped_and_reading_goes_on() -> None:
    for one, other in zip(_one_row([5, 40, 9]), _one_row([5, 9, -1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_more_entries_than_keys_are_not_read() -> None:
    same = _one_row([0, 1, 2], kv_len=3)
    for one, other in zip(_one_row([0, 1, 2, 0, 1], kv_len=3), same, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_order_of_the_indices_does_not_matter() -> None:
    for one, other in zip(_one_row([5, 9, 30]), _one_row([30, 5, 9]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_row_that_selects_nothing_is_zero() -> None:
    out, maximum, total = _one_row([-1, 3])
    assert not out.any()
    assert not maximum.any()
    assert not total.any()


def test_a_row_that_selects_nothing_reports_its_sink() -> None:
    sinks = torch.tensor([1.0, -2.0, 0.5, 3.0])
    out, maximum, total = _one_row([-1, 3], sinks=sinks)
    assert not out.any()
    assert torch.equal(maximum[0, 0], sinks)
    assert torch.equal(total[0, 0], torch.ones(4))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_before_the_first_key_are_zero_even_with_sinks(provider: str) -> None:
    p = _fixed(q_lens=[5], kv_lens=[2], sinks=True)
    out, maximum, total = ops.sparse_flash_attention(**call(p), provider=provider)
    assert not out[:3].any()
    assert not maximum[0, :3].any()
    assert not total[0, :3].any()
    assert bool(total[0, 3:].all())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_value_of_its_own_follows_the_formula(provider: str) -> None:
    arguments = call(_fixed())
    plain, _, _ = ops.sparse_flash_attention(**arguments, provider=provider)
    arguments["value"] = 2 * arguments["key"]
    twice, _, _ = ops.sparse_flash_attention(**arguments, provider=provider)
    torch.testing.assert_close(twice, 2 * plain, rtol=1e-6, atol=1e-6)
    arguments["value"] = None
    latent, _, _ = ops.sparse_flash_attention(**arguments, provider=provider)
    torch.testing.assert_close(latent, plain, rtol=1e-6, atol=1e-6)


@settings(max_examples=scale(15))
@given(problems())
def test_many_small_tiles_equal_one(p: Problem) -> None:
    arguments = call(p)
    whole = ops.sparse_flash_attention(**arguments, provider="cpu")
    module = importlib.import_module("ascend_attn_ops.operators._shared.selected_attention")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE_ELEMENTS", 1)
        tiled = ops.sparse_flash_attention(**arguments, provider="cpu")
    for one, other in zip(tiled, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_block_addresses_beyond_32_bits(provider: str) -> None:
    """Block 7768 of pages of 276480 elements begins after element 2**31 (case 39)."""
    pages = torch.empty(7769, 276480, dtype=torch.float16)  # only the touched pages take memory
    key = pages.as_strided((7769, 16, 1, 16), (276480, 16, 16, 1))
    rope = pages.as_strided((7769, 16, 1, 4), (276480, 4, 4, 1), 1024)
    p = _fixed(q_lens=[1], kv_lens=[16], entries=16)
    arguments = call(p, torch.float16)
    block = int(arguments["block_table"][0, 0])
    key[7768], rope[7768] = arguments["key"][block], arguments["key_rope"][block]
    far = {"key": key, "value": key, "key_rope": rope}
    far["block_table"] = torch.tensor([[7768]], dtype=torch.int32)
    want = ops.sparse_flash_attention(**arguments, provider=provider)
    got = ops.sparse_flash_attention(**(arguments | far), provider=provider)
    assert want[0].any()
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_a_position_beyond_the_block_row_is_an_error_not_the_next_row() -> None:
    arguments = call(_fixed(q_lens=[1, 1], kv_lens=[16, 16]))
    arguments["actual_seq_lengths_kv"] = torch.tensor([40, 16], dtype=torch.int32)
    arguments["sparse_indices"] = torch.full((2, 1, 1), 20, dtype=torch.int32)
    with pytest.raises(IndexError):
        ops.sparse_flash_attention(**arguments, provider="cpu")


def test_blocks_that_start_between_two_rows_are_read_too() -> None:
    arguments = call(_fixed())
    want = ops.sparse_flash_attention(**arguments, provider="cpu")
    blocks, per_block, _, size = arguments["key"].shape
    step = per_block * size + 8  # half a row more than a block
    key = torch.zeros(blocks * step).as_strided(arguments["key"].shape, (step, size, size, 1))
    key.copy_(arguments["key"])
    got = ops.sparse_flash_attention(**(arguments | {"key": key, "value": key}), provider="cpu")
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_maximum_and_sum_convert_to_partial_attention_and_merge(layout: str) -> None:
    """Two halves of the selected keys, merged, equal the whole (decode context parallel)."""
    p = _fixed(layout_query=layout, entries=10)
    arguments = call(p)
    arguments["sparse_indices"] = arguments["sparse_indices"].clamp(min=0) % 6
    parts = []
    for half in arguments["sparse_indices"].split([3, 7], -1):
        result = ops.sparse_flash_attention(**(arguments | {"sparse_indices": half}))
        parts.append(ops.PartialAttention.from_max_and_sum(*result))
    merged = ops.merge_partials(parts)
    out, maximum, total = ops.sparse_flash_attention(**arguments)
    whole = ops.PartialAttention.from_max_and_sum(out, maximum, total)
    seen = whole.lse.isfinite().all(-1) & (_seen(p) >= 10)
    assert int(seen.sum()) >= 4
    torch.testing.assert_close(merged.out[seen], whole.out[seen], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.lse[seen], whole.lse[seen], rtol=1e-5, atol=1e-5)
    assert torch.equal(whole.out, out.reshape(-1, *out.shape[-2:]))


def _seen(p: Problem) -> torch.Tensor:
    """Visible keys of each row; padding rows 0."""
    s = p.shape
    counts = [
        torch.arange(k - q + 1, k + 1)[:, None, None]
        for q, k in zip(s.q_lens, s.kv_lens, strict=True)
    ]
    return lay_out_rows(s, counts, 0).flatten()


def test_statistics_are_not_computed_unless_asked_for() -> None:
    for provider in PROVIDERS:
        arguments = call(_fixed(), return_softmax_lse=False)
        _, maximum, total = ops.sparse_flash_attention(**arguments, provider=provider)
        assert maximum.shape == total.shape == (0,)


def _changed(tensor: torch.Tensor, place: tuple[int, ...], value: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


@pytest.mark.parametrize(
    ("name", "place", "value", "text"),
    [
        ("actual_seq_lengths_query", (1,), 1, r"value 1 after 3 at 1"),
        ("actual_seq_lengths_query", (2,), 11, r"value 11 at 2, room 10"),
        ("actual_seq_lengths_kv", (1,), 99, r"value 99 at 1, room 48"),
        ("actual_seq_lengths_kv", (0,), -1, r"value -1 at 0"),
        ("block_table", (1, 2), 400, r"block_table\[1, 2\] = 400"),
        ("sparse_indices", (0, 0, 1), 20, r"row 0, entry 1 = 20 of 20 blocks"),
        ("sparse_indices", (9, 0, 0), -1, r"row 9, entry 1 = 0 after a -1"),
        ("key", (0, 0, 0, 0), 50, r"first different element at \[0, 0, 0, 0\]"),
    ],
)
def test_sanitizer_names_the_first_bad_element(
    name: str, place: tuple[int, ...], value: int, text: str
) -> None:
    arguments = call(_fixed()) | {"sparse_indices": torch.zeros(10, 1, 12, dtype=torch.int32)}
    with ops.sanitize():
        ops.sparse_flash_attention(**arguments)
    arguments[name] = _changed(arguments[name], place, value)
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.sparse_flash_attention(**arguments)


def _torch_call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = call(_fixed())
    kwargs["value"] = kwargs["key"].clone()
    names = ("query", "key", "value", "sparse_indices", "scale_value")
    return tuple(kwargs.pop(name) for name in names), kwargs


@pytest.mark.parametrize("wanted", [True, False])
def test_opcheck(wanted: bool) -> None:
    args, kwargs = _torch_call()
    kwargs["return_softmax_lse"] = wanted
    torch.library.opcheck(
        torch.ops.ascend_attn.sparse_flash_attention,
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
    args, kwargs = _torch_call()

    def twice(query: torch.Tensor) -> torch.Tensor:
        out, maximum, _ = torch.ops.ascend_attn.sparse_flash_attention(query, *args[1:], **kwargs)
        return out * 2 + maximum[0, ..., None]

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(args[0]), twice(args[0]))
