"""Work-around: maximum and sum over paged keys through torch_npu 2.13.

With a TND query and PA_BSND keys torch_npu 2.13.0 takes the number of key heads from dimension 1
of the key, which is the block size there: it makes statistics of shape (block_size, T, 0). With a
BSND query it takes dimension 2, which is right. So the call is made with every query row as a
request of its own, a BSND query of one row: its keys end where the row may see no more. All of it
stays on the device. ``tests/npu_path/test_torch_npu_defects.py`` fails when this is not needed.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from .arguments import SparseFlashAttentionArguments as Args


def needed(a: Args) -> bool:
    """Whether torch_npu would make the statistics of this call wrong."""
    return a.return_softmax_lse and (a.layout_query, a.layout_kv) == ("TND", "PA_BSND")


def rows_as_requests(a: Args) -> Args:
    """The same rows as T requests of one query row each, for a causal call without lengths."""
    assert a.actual_seq_lengths_query is not None  # noqa: S101 - the contract demands it
    assert a.actual_seq_lengths_kv is not None  # noqa: S101
    assert a.block_table is not None  # noqa: S101
    ends = a.actual_seq_lengths_query
    rows = torch.arange(len(a.query), dtype=ends.dtype, device=ends.device)
    request = torch.bucketize(rows, ends, right=True)
    real = request < len(ends)  # rows behind the last request see nothing
    request = request.clamp(max=len(ends) - 1)
    seen = a.actual_seq_lengths_kv.index_select(0, request)
    if a.sparse_mode == 3:
        seen = seen + rows + 1 - ends.index_select(0, request)
    record: Any = a  # mypy does not see that the record decorator is attrs.frozen
    evolved: Args = attrs.evolve(
        record,
        query=a.query.unsqueeze(1),
        query_rope=None if a.query_rope is None else a.query_rope.unsqueeze(1),
        sparse_indices=a.sparse_indices.unsqueeze(1),
        layout_query="BSND",
        actual_seq_lengths_query=None,
        actual_seq_lengths_kv=(seen.clamp(min=0) * real).to(ends.dtype),
        block_table=a.block_table.index_select(0, request),
    )
    return evolved


def as_packed(outputs: Any) -> tuple[torch.Tensor, ...]:
    """(T, 1, N, D) and (T, 1, 1, N) as a TND call returns them: (T, N, D) and (1, T, N)."""
    out, *statistics = outputs
    return out.squeeze(1), *(values.flatten(0, 2).unsqueeze(0) for values in statistics)
