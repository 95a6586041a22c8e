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
UNTOUCHED = 77


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    requests = draw(st.integers(1, 4))
    block_size = draw(st.sampled_from([1, 4, 16]))
    blocks, width = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    ids = st.lists(st.integers(-2, blocks + 1), min_size=width, max_size=width)
    lengths = st.lists(st.integers(0, 3 * block_size), min_size=requests, max_size=requests)
    offsets = st.lists(st.integers(0, 3 * block_size), min_size=requests, max_size=requests)
    lens = draw(lengths)
    return {
        "table": draw(st.lists(ids, min_size=requests, max_size=requests)),
        "lens": lens,
        "offsets": draw(st.none() | offsets),
        "cumulative": draw(st.booleans()),
        "rows": max(sum(lens) + draw(st.integers(-2, 3)), 0),
        "blocks": blocks,
        "block_size": block_size,
        "heads": draw(st.integers(1, 3)),
        "sizes": draw(st.sampled_from([(4, 4), (16, 2), (3, 5)])),
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.int8])),
        "integers": draw(st.sampled_from([torch.int32, torch.int64])),
        "strided": draw(st.booleans()),
    }


def caches(p: dict[str, Any]) -> list[torch.Tensor]:
    """Every element different as far as the dtype allows."""
    made = []
    for size in p["sizes"]:
        shape = (p["blocks"], p["block_size"], p["heads"], size)
        cache = (torch.arange(numpy.prod(shape)).reshape(shape) % 119 + 1).to(p["dtype"])
        if p["strided"]:
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        made.append(cache)
    return made


def by_whole_blocks(p: dict[str, Any], cache: torch.Tensor) -> numpy.ndarray:
    """All rows: the blocks of a request laid end to end, cut at its length."""
    pages = cache.double().numpy()
    nothing = numpy.zeros_like(pages[0])
    rows = []
    for request, length in enumerate(p["lens"]):
        skip = p["offsets"][request] // p["block_size"] if p["offsets"] else 0
        ids = p["table"][request][skip:] + [-1] * 99
        chosen = [pages[i] if 0 <= i < len(pages) else nothing for i in ids]
        rows.append(numpy.concatenate(chosen)[:length])
    return numpy.concatenate(rows)


def gather(p: dict[str, Any], provider: str) -> tuple[torch.Tensor, ...]:
    outputs = [
        torch.full((p["rows"], p["heads"], size), UNTOUCHED, dtype=p["dtype"])
        for size in p["sizes"]
    ]
    lens = [0, *numpy.cumsum(p["lens"]).tolist()] if p["cumulative"] else p["lens"]
    offset = None if p["offsets"] is None else torch.tensor(p["offsets"], dtype=p["integers"])
    result = ops.gather_pa_kv_cache(
        *caches(p),
        torch.tensor(p["table"], dtype=p["integers"]),
        torch.tensor(lens, dtype=p["integers"]),
        *outputs,
        seq_offset=offset,
        is_seq_lens_cumsum=p["cumulative"],
        provider=provider,
    )
    assert result is None
    return tuple(outputs)


@settings(max_examples=scale(500))
@given(problems())
def test_rows_are_those_of_the_blocks_laid_end_to_end(p: dict[str, Any]) -> None:
    for provider in PROVIDERS:
        for cache, found in zip(caches(p), gather(p, provider), strict=True):
            want = by_whole_blocks(p, cache)
            written = min(len(want), p["rows"])
            assert numpy.array_equal(found[:written].double().numpy(), want[:written])
            assert bool((found[written:] == UNTOUCHED).all())


def simple(**changes: Any) -> dict[str, Any]:
    return {
        "table": [[2, 0], [1, 2]], "lens": [5, 3], "offsets": None, "cumulative": False,
        "rows": 8, "blocks": 3, "block_size": 4, "heads": 1, "sizes": (8, 4),
        "dtype": torch.float32, "integers": torch.int32, "strided": False,
    } | changes  # fmt: skip


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_swapped_block_is_noticed(provider: str) -> None:
    """Negative control of the oracle."""
    found, _ = gather(simple(), provider)
    other = by_whole_blocks(simple(table=[[0, 2], [1, 2]]), caches(simple())[0])
    assert not numpy.array_equal(found.double().numpy(), other)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_missing_block_is_zero_and_offset_moves_by_whole_blocks(provider: str) -> None:
    key, value = gather(simple(table=[[-1, 0], [1, 2]]), provider)
    assert not key[:4].any()
    assert key[4:].all()
    assert value[4:].all()
    moved, _ = gather(simple(lens=[2, 0], rows=2, offsets=[5, 0]), provider)
    exact, _ = gather(simple(lens=[2, 0], rows=2, offsets=[4, 0]), provider)
    assert torch.equal(moved, exact)
    assert torch.equal(moved, caches(simple())[0][0, :2])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_addresses_beyond_32_bits(provider: str) -> None:
    """A view whose blocks lie 2**31 bytes apart over one small store."""
    blocks = 5
    store = torch.zeros(64)
    cache = store.as_strided((blocks, 4, 1, 4), (8, 4, 4, 1))
    store[:] = torch.arange(64.0)
    huge = torch.empty(2**31 + 64, dtype=torch.int8)  # never touched but for its last bytes
    huge[2**31 :] = torch.arange(64, dtype=torch.int8)
    far = huge.as_strided((2, 4, 1, 4), (2**31, 4, 4, 1))
    rows = torch.zeros(4, 1, 4, dtype=torch.int8)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    ops.gather_pa_kv_cache(far, far, table, lens, rows, rows.clone(), provider=provider)
    assert rows.flatten().tolist() == list(range(16))
    near = torch.zeros(4, 1, 4)
    ops.gather_pa_kv_cache(cache, cache, table, lens, near, near.clone(), provider=provider)
    assert near.flatten().tolist() == list(range(8, 24))


def test_nz_caches_are_refused_on_the_host_with_the_reason() -> None:
    cache, rows = torch.zeros(2, 2, 16, 8), torch.zeros(3, 4, 4)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ops.NoProviderError, match="does not carry its format"):
        ops.gather_pa_kv_cache(cache, cache, table, lens, rows, rows.clone())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lens": [5, -3]}, r"seq_lens\[1\] = -3"),
        ({"rows": 7}, "7 rows for 8 tokens"),
        ({"lens": [5, 9], "rows": 20}, r"request 1 reads columns 0\.\.2 of 2"),
        ({"table": [[2, 3], [1, 2]]}, r"block_tables\[0, 1\] = 3"),
        ({"offsets": [0, 5], "lens": [5, 1]}, r"seq_offset\[1\] = 5"),
    ],
)
def test_sanitizer_names_the_first_bad_value(changes: dict[str, Any], text: str) -> None:
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        gather(simple(**changes), "cpu")


def test_sanitizer_accepts_missing_blocks_and_padding_of_the_table() -> None:
    with ops.sanitize():
        gather(simple(table=[[-1, 0], [1, 99]]), "cpu")


def test_falling_prefix_sums_are_found() -> None:
    args = ops.GatherPaKvCacheArguments(
        *caches(simple()), torch.zeros(2, 2, dtype=torch.int32),
        torch.tensor([0, 5, 3], dtype=torch.int32), torch.zeros(8, 1, 8), torch.zeros(8, 1, 4),
        is_seq_lens_cumsum=True,
    )  # fmt: skip
    (refusal,) = ops.gather_pa_kv_cache.contract.broken_values(args, None)
    assert refusal.found == "seq_lens[2] = 3"


def test_opcheck_and_compile() -> None:
    p = simple()
    args = (*caches(p), torch.tensor(p["table"]), torch.tensor(p["lens"]))
    rows = torch.zeros(8, 1, 8), torch.zeros(8, 1, 4)
    operator = torch.ops.ascend_attn.gather_pa_kv_cache
    torch.library.opcheck(operator, (*args, *rows), {"seq_offset": torch.tensor([4, 0])})
    rows = torch.zeros(8, 1, 8), torch.zeros(8, 1, 4)

    def summed(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        operator(*args, key, value)
        return key.sum() + value.sum()

    want = sum(by_whole_blocks(p, cache).sum() for cache in caches(p))
    compiled = torch.compile(summed, fullgraph=True, backend="aot_eager")
    assert float(compiled(*rows)) == want
