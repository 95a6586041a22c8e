"""Defects of torch_npu 2.13.0 that our providers avoid; a failing test says: stop avoiding it."""

from __future__ import annotations

import torch
from npu_path.cases import sparse_attention
from npu_path.support import on_npu

from ascend_attn_ops.emulator import Emulator


def test_statistics_of_a_packed_query_over_paged_keys_have_a_wrong_shape(npu: Emulator) -> None:
    """When this fails, operators/sparse_flash_attention/paged_statistics.py can go."""
    import torch_npu

    made = on_npu(sparse_attention(torch.Generator().manual_seed(1)))
    positional = [made.pop(name) for name in ("query", "key", "value", "sparse_indices")]
    with npu.record() as seen:
        _, maximum, total = torch_npu.npu_sparse_flash_attention(
            *positional, made.pop("scale_value"), **made, return_softmax_lse=True
        )
    block_size, rows = 16, 4
    assert maximum.shape == total.shape == (block_size, rows, 0)  # right: (1, rows, heads)
    (call,) = seen.calls
    assert call.described()["softmax_max"] == "float32[16, 4, 0]"
