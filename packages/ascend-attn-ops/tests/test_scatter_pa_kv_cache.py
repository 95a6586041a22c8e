from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ascend_attn_ops as ops

PROVIDERS = ("reference", "cpu")


def caches(
    mode: str, heads: int, size: int, blocks: int, bs: int, dtype: torch.dtype
) -> torch.Tensor:
    if mode == "Norm":
        return torch.full((blocks, bs, heads, size), 9, dtype=dtype)
    inner = 32 // dtype.itemsize
    return torch.full((blocks, -(-heads * size // inner), bs, inner), 9, dtype=dtype)


def read_slot(cache: torch.Tensor, mode: str, slot: int, heads: int, size: int) -> torch.Tensor:
    """The row of a slot, by the documented address formula, element by element."""
    bs = cache.shape[1] if mode == "Norm" else cache.shape[2]
    block, offset = slot // bs, slot % bs
    if mode == "Norm":
        return cache[block, offset]
    inner = cache.shape[3]
    flat = [cache[block, e // inner, offset, e % inner] for e in range(heads * size)]
    return torch.stack(flat).view(heads, size)


@given(
    st.sampled_from(["Norm", "PA_NZ"]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.int8]),
    st.lists(st.integers(-2, 63), min_size=1, max_size=20, unique=True),
    st.sampled_from([(1, 16, 16), (2, 32, 64), (3, 8, 4)]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_every_slot_holds_its_token_and_nothing_else_changed(
    mode: str,
    dtype: torch.dtype,
    slots: list[int],
    shape: tuple[int, int, int],
    slot_dtype: torch.dtype,
) -> None:
    heads, key_size, value_size = shape
    key = torch.randint(-8, 8, (len(slots), heads, key_size)).to(dtype)
    value = torch.randint(-8, 8, (len(slots), heads, value_size)).to(dtype)
    mapping = torch.tensor(slots, dtype=slot_dtype)
    for provider in PROVIDERS:
        key_cache = caches(mode, heads, key_size, 4, 16, dtype)
        value_cache = caches(mode, heads, value_size, 4, 16, dtype)
        result = ops.scatter_pa_kv_cache(
            key, value, key_cache, value_cache, mapping, cache_mode=mode, provider=provider
        )
        assert result is None
        for cache, rows, size in ((key_cache, key, key_size), (value_cache, value, value_size)):
            for slot in range(64):
                row = read_slot(cache, mode, slot, heads, size)
                if slot in slots:
                    assert torch.equal(row, rows[slots.index(slot)])
                else:
                    assert bool((row == 9).all())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_writes_through_strided_views(provider: str) -> None:
    store = torch.zeros(3, 2, 16, 24)  # [blocks, heads, block_size, key | value]
    key_cache, value_cache = (store[..., s].transpose(1, 2) for s in (slice(16), slice(16, 24)))
    key, value = torch.randn(2, 2, 16), torch.randn(2, 2, 8)
    slots = torch.tensor([17, -1])
    ops.scatter_pa_kv_cache(
        key, value, key_cache, value_cache, slots, cache_mode="Norm", provider=provider
    )
    assert torch.equal(store[1, :, 1, :16], key[0])
    assert torch.equal(store[1, :, 1, 16:], value[0])
    assert store.count_nonzero() == 48


def test_forgotten_cache_mode_is_explained() -> None:
    key = torch.zeros(1, 4, 32)
    cache = torch.zeros(2, 32, 4, 32)
    with pytest.raises(ops.OpArgumentError, match='pass cache_mode="Norm"'):
        ops.scatter_pa_kv_cache(key, key, cache, cache.clone(), torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("slots", "text"), [([3, 64], r"slot_mapping\[1\] = 64"), ([3, 3], "slot 3 2 times")]
)
def test_sanitizer_names_bad_slots(slots: list[int], text: str) -> None:
    key = torch.zeros(2, 1, 8)
    cache = torch.zeros(4, 16, 1, 8)
    with ops.sanitize(), pytest.raises(ops.SanitizerError, match=text):
        ops.scatter_pa_kv_cache(
            key, key, cache, cache.clone(), torch.tensor(slots), cache_mode="Norm"
        )
