from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_attn_backends import (
    AttentionMaskBuilder,
    InvalidFieldError,
    MaskMode,
    PagedCacheShape,
    attention_view,
    element_offsets,
    num_blocks_for,
    repair_starts,
    scatter_view,
    slots_for_positions,
)
from ascend_attn_backends.starts import repaired_on_host


def test_cache_shape() -> None:
    shape = PagedCacheShape(num_blocks=10, num_kv_heads=2, block_size=16, head_size=64)
    assert shape.logical == (10, 2, 16, 64)
    assert shape.num_slots == 160
    assert shape.bytes_per_token(torch.bfloat16) == 256
    cache = shape.allocate(torch.bfloat16)
    assert tuple(cache.shape) == shape.logical
    assert cache.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("field", ["num_blocks", "num_kv_heads", "block_size", "head_size"])
def test_cache_shape_refuses_empty_dimensions(field: str) -> None:
    sizes = {"num_blocks": 1, "num_kv_heads": 1, "block_size": 1, "head_size": 1, field: 0}
    with pytest.raises(ValueError, match=f"'{field}' must be >= 1: 0"):
        PagedCacheShape(**sizes)


def test_views_share_the_memory() -> None:
    cache = PagedCacheShape(3, 2, 4, 5).allocate(torch.float32)
    cache[2, 1, 3, 4] = 7.0
    assert attention_view(cache).shape == (3, 4, 10)
    assert attention_view(cache)[2, 3, 9] == 7.0
    assert scatter_view(cache)[2, 3, 1, 4] == 7.0
    for view in (attention_view(cache), scatter_view(cache)):
        assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


def test_head_major_memory_keeps_its_rank() -> None:
    cache = torch.zeros(3, 2, 4, 5)
    assert attention_view(cache) is cache


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_num_blocks(tokens: int, blocks: int) -> None:
    assert num_blocks_for(tokens, 16) == blocks


def test_negative_position_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"positions\[0\]: found -1; allowed: 0 to 31"):
        slots_for_positions(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([-1]), 16)


def test_offsets_beyond_63_bits_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="block_stride: found 4611686018427387904"):
        element_offsets(torch.tensor([2]), 2**62)


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31))
def test_offsets_are_exact(block: int, stride: int) -> None:
    assert (
        element_offsets(torch.tensor([block], dtype=torch.int32), stride).item() == block * stride
    )


def test_template() -> None:
    template = AttentionMaskBuilder().template()
    assert template.shape == (2048, 2048)
    assert template.dtype == torch.int8
    positions = torch.arange(2048)
    assert torch.equal(template.bool(), positions > positions[:, None])


def test_template_is_built_once_per_device() -> None:
    masks = AttentionMaskBuilder()
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(masks.template())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({t.data_ptr() for t in found}) == 1
    assert masks.template("meta").device.type == "meta"
    assert masks.template("cpu") is found[0]


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [
        (None, True, (3, 2**31 - 1, 2**31 - 1)),
        (None, False, (0, 2**31 - 1, 2**31 - 1)),
        (1, True, (4, 0, 0)),
        (4096, True, (4, 4095, 0)),
        (4096, False, (4, 4095, 4095)),
    ],
)
def test_window_to_mode(window: int | None, causal: bool, expected: tuple[int, int, int]) -> None:
    mode = MaskMode.for_window(window, causal=causal)
    assert (mode.sparse_mode, mode.pre_tokens, mode.next_tokens) == expected
    assert mode.needs_template == (expected[0] != 0)


@pytest.mark.parametrize("window", [0, -1])
def test_windows_without_keys_are_refused(window: int) -> None:
    with pytest.raises(InvalidFieldError, match=r"sliding_window: found .*at least 1 key"):
        MaskMode.for_window(window, causal=True)


@given(st.lists(st.integers(-9, 30), min_size=1, max_size=12), st.integers(0, 20))
def test_repaired_starts_are_monotone_and_inside(starts: list[int], tokens: int) -> None:
    given_starts = torch.tensor(starts, dtype=torch.int32)
    repaired = repair_starts(given_starts, tokens)
    assert repaired.dtype == torch.int32
    assert given_starts.tolist() == starts
    assert repaired_on_host(given_starts, tokens) == repaired.tolist()
    highest = 0
    for raw, value in zip(starts, repaired.tolist(), strict=True):
        highest = max(highest, min(max(raw, 0), tokens))
        assert value == highest


@given(st.lists(st.integers(0, 5), max_size=8))
def test_right_starts_are_unchanged(lengths: list[int]) -> None:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    assert torch.equal(repair_starts(starts, sum(lengths)), starts)
