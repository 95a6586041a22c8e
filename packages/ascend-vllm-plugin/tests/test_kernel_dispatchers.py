"""The torch kernels of the patch, against loops over requests."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_vllm_plugin.patches import PATCHES
from ascend_vllm_plugin.patches.kernel_dispatchers import (
    DISPATCHERS,
    TORCH_KERNELS,
    eagle_step,
    expand,
)

BLOCK_SIZE, BLOCKS, MAX_LEN, PAD = 4, 3, 11, -1


@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 2)), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int32, torch.int64]),
)
def test_expand(rows, dtype):
    counts = [count for count, _ in rows]
    values = torch.tensor([value for _, value in rows], dtype=dtype)
    output = torch.full((sum(counts) + 2,), 9, dtype=dtype)
    expand(output, values, torch.tensor(counts).cumsum(0).int(), -1, 7, MAX_NUM_TOKENS=128)
    expected = [7 if value == -1 else value for count, value in rows for _ in range(count)]
    assert output.tolist() == [*expected, 9, 9]
    assert output.dtype == dtype


@given(
    rows=st.lists(
        st.tuples(st.integers(0, MAX_LEN), st.integers(0, MAX_LEN)), min_size=1, max_size=5
    ),
    padding=st.integers(0, 3),
)
def test_eagle_step(rows, padding):
    count = len(rows)
    table = torch.arange(count * BLOCKS, dtype=torch.int32).reshape(count, BLOCKS).flip(0)
    positions = torch.tensor([position for position, _ in rows])
    lens = torch.tensor([length for _, length in rows], dtype=torch.int32)
    out, slots = torch.full((count,), -9), torch.full((count + padding,), -9)
    eagle_step(positions, table, lens, out, slots, BLOCK_SIZE, MAX_LEN, BLOCKS, PAD)
    for row, (position, length) in enumerate(rows):
        if position + 1 >= MAX_LEN:
            assert (out[row], slots[row], lens[row]) == (0, PAD, 1)
            continue
        block, offset = divmod(position + 1, BLOCK_SIZE)
        assert out[row] == position + 1
        assert slots[row] == int(table[row, block]) * BLOCK_SIZE + offset
        assert lens[row] == min(length + 1, MAX_LEN)
    assert slots[count:].tolist() == [PAD] * padding


def test_every_patch_says_why_and_for_which_vllm():
    for patch in PATCHES:
        assert patch.reason
        assert patch.versions.contains("0.30.0") is (patch.name != "kernel_scan")
        assert all(patch.versions.contains(version) for version in ("0.31.0rc1", "0.32.0"))
        assert not any(patch.versions.contains(version) for version in ("0.29.9", "0.33.0"))


@pytest.mark.parametrize("kernel", sorted(TORCH_KERNELS))
def test_every_torch_kernel_is_used(kernel):
    assert kernel in DISPATCHERS.values()
