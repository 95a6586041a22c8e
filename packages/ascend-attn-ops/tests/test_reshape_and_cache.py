from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_scale import scale
from test_scatter_pa_kv_cache import caches, read_slot

import ascend_attn_ops as ops

PROVIDERS = ("reference", "cpu")


@settings(max_examples=scale(250))
@given(
    st.sampled_from(["Norm", "PA_NZ"]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.int8]),
    st.lists(st.integers(-2, 31), min_size=1, max_size=12, unique=True),
    st.sampled_from([(1, 16, 16), (2, 32, 64), (4, 16, 8)]),
)
def test_every_slot_holds_its_token(
    mode: str, dtype: torch.dtype, slots: list[int], shape: tuple[int, int, int]
) -> None:
    heads, *sizes = shape
    rows = [torch.randint(-8, 8, (len(slots), heads, size)).to(dtype) for size in sizes]
    for provider in PROVIDERS:
        stores = [caches(mode, heads, size, 2, 16, dtype) for size in sizes]
        mapping = torch.tensor(slots, dtype=torch.int32)
        assert ops.reshape_and_cache(*rows, *stores, mapping, provider=provider) is None
        for store, new, size in zip(stores, rows, sizes, strict=True):
            for slot in range(32):
                found = read_slot(store, mode, slot, heads, size)
                if slot in slots:
                    assert torch.equal(found, new[slots.index(slot)])
                else:
                    assert bool((found == 9).all())


def test_it_writes_what_scatter_pa_kv_cache_writes_in_norm_mode() -> None:
    key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 8)
    slots = torch.tensor([17, -1, 4], dtype=torch.int32)
    ours = [torch.zeros(2, 16, 2, size) for size in (16, 8)]
    theirs = [cache.clone() for cache in ours]
    ops.reshape_and_cache(key, value, *ours, slots)
    ops.scatter_pa_kv_cache(key, value, *theirs, slots, cache_mode="Norm")
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        assert bool(mine.any())


def test_one_plain_and_one_nz_cache_is_refused() -> None:
    args = {
        "key": torch.zeros(1, 4, 32), "value": torch.zeros(1, 4, 32),
        "key_cache": torch.zeros(2, 16, 4, 32), "value_cache": torch.zeros(2, 16, 16, 8),
        "slot_indices": torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip
    with pytest.raises(ops.OpArgumentError, match="both caches in one form"):
        ops.reshape_and_cache(**args)


@pytest.mark.parametrize(
    ("slots", "text"), [([3, 32], r"slot_indices\[1\] = 32 of 32"), ([3, 3], "slot 3 2 times")]
)
def test_sanitizer_names_bad_slots(slots: list[int], text: str) -> None:
    rows, cache = torch.zeros(2, 1, 8), torch.zeros(2, 16, 1, 8)
    mapping = torch.tensor(slots, dtype=torch.int32)
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.reshape_and_cache(rows, rows, cache, cache.clone(), mapping)


def test_opcheck() -> None:
    key, value = torch.randn(2, 2, 16), torch.randn(2, 2, 8)
    stores = torch.zeros(3, 16, 2, 16), torch.zeros(3, 16, 2, 8)
    slots = torch.tensor([17, 3], dtype=torch.int32)
    torch.library.opcheck(torch.ops.ascend_attn.reshape_and_cache, (key, value, *stores, slots))
