from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale

import ascend_attn_ops as ops

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    rows, block_size = draw(st.integers(0, 4)), draw(st.sampled_from([16, 32]))
    width, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "lens": draw(
            st.lists(st.integers(0, width * block_size), min_size=rows, max_size=rows)
        ),
        "block_size": block_size, "width": width, "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 3)),
        "sizes": draw(st.sampled_from([(16, 16), (24, 8), (32, 48)])),
        "dtype": draw(st.sampled_from(list(TOLERANCES))),
        "nz": draw(st.booleans()), "seed": draw(st.integers(0, 2**31)),
    }  # fmt: skip


def simple(**changes: Any) -> dict[str, Any]:
    return {
        "lens": [5, 20], "block_size": 16, "width": 2, "kv_heads": 2, "heads": 4, "sizes": (16, 8),
        "dtype": torch.float32, "nz": False, "seed": 0,
    } | changes  # fmt: skip


def nz_order(cache: torch.Tensor) -> torch.Tensor:
    """(num_blocks, pieces, block_size, L), element by element of the definition."""
    inner = 32 // cache.element_size()
    flat = cache.flatten(2)
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[2] % inner), value=float("nan"))
    return torch.stack(flat.split(inner, 2), 1).contiguous()


def build(p: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[numpy.ndarray, ...]]]:
    """Arguments, and keys and values (KN, L, D) of each row in float64."""
    rng = torch.Generator().manual_seed(p["seed"])
    rows, blocks = len(p["lens"]), len(p["lens"]) * p["width"] + 1
    caches = [
        torch.randn(blocks, p["block_size"], p["kv_heads"], size, generator=rng).to(p["dtype"])
        for size in p["sizes"]
    ]
    table = torch.randperm(blocks, generator=rng)[: rows * p["width"]].reshape(rows, p["width"])
    dense = []
    for ids, length in zip(table.tolist(), p["lens"], strict=True):
        parts = ([cache[i].double().numpy() for i in ids] for cache in caches)
        dense.append(tuple(numpy.concatenate(part)[:length].swapaxes(0, 1) for part in parts))
    return {
        "query": torch.randn(rows, p["heads"], p["sizes"][0], generator=rng).to(p["dtype"]),
        "key_cache": nz_order(caches[0]) if p["nz"] else caches[0],
        "value_cache": nz_order(caches[1]) if p["nz"] else caches[1],
        "num_kv_heads": p["kv_heads"], "num_heads": p["heads"], "scale_value": 0.31,
        "block_table": table.int(), "context_lens": torch.tensor(p["lens"], dtype=torch.int32),
        "out": torch.full((rows, p["heads"], p["sizes"][1]), 7, dtype=p["dtype"]),
    }, dense  # fmt: skip


def by_head(p: dict[str, Any], a: dict[str, Any], dense: Any, row: int) -> numpy.ndarray:
    key, value = dense[row]
    heads = []
    for head, query in enumerate(a["query"][row].double().numpy()):
        group = head * p["kv_heads"] // p["heads"]
        mass = numpy.exp(0.31 * (key[group] @ query))
        heads.append(mass @ value[group] / mass.sum() if mass.size else numpy.zeros(p["sizes"][1]))
    return numpy.stack(heads)


@settings(max_examples=scale(400))
@given(problems())
def test_rows_equal_dense_attention_in_float64(p: dict[str, Any]) -> None:
    a, dense = build(p)
    assert ops.paged_attention(**a) is None
    tolerance = TOLERANCES[p["dtype"]]
    for row in range(len(p["lens"])):
        want = by_head(p, a, dense, row)
        found = a["out"][row].double()
        numpy.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance)


def test_one_more_key_is_noticed() -> None:
    """Negative control of the oracle."""
    a, dense = build(simple())
    a["context_lens"] += 1
    ops.paged_attention(**a)
    assert not numpy.allclose(a["out"][0], by_head(simple(), a, dense, 0), atol=1e-3)


def test_equals_torch_sdpa_with_grouped_heads() -> None:
    a, dense = build(simple(sizes=(16, 16)))
    ops.paged_attention(**a)
    for row, parts in enumerate(dense):
        key, value = (torch.from_numpy(part).float()[None] for part in parts)
        want = torch.nn.functional.scaled_dot_product_attention(
            a["query"][row][None, :, None], key, value, scale=0.31, enable_gqa=True
        )
        torch.testing.assert_close(a["out"][row], want[0, :, 0])


def test_several_query_rows_per_request_are_sent_to_splitfuse() -> None:
    a, _ = build(simple())
    a["block_table"] = a["block_table"][:1]
    with pytest.raises(ops.OpArgumentError, match="splitfuse"):
        ops.paged_attention(**a)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"context_lens": [5, 0]}, r"context_lens\[1\] = 0 with room for 32"),
        ({"context_lens": [5, 33]}, r"context_lens\[1\] = 33 with room for 32"),
        ({"block_table": [[0, 9], [1, -1]]}, r"block_table\[1, 1\] = -1 of 5 blocks"),
    ],
)
def test_sanitizer_names_the_first_bad_value(changes: dict[str, Any], text: str) -> None:
    a, _ = build(simple())
    a |= {name: torch.tensor(value, dtype=torch.int32) for name, value in changes.items()}
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.paged_attention(**a)


def test_opcheck_and_compile() -> None:
    a, dense = build(simple())
    operator = torch.ops.ascend_attn.paged_attention
    torch.library.opcheck(operator, tuple(a.values()))

    def attend(out: torch.Tensor) -> torch.Tensor:
        operator(**{**a, "out": out})
        return out * 2

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = compiled(torch.zeros_like(a["out"]))
    numpy.testing.assert_allclose(found[1], 2 * by_head(simple(), a, dense, 1), rtol=1e-4)
