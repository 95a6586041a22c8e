"""Shapes and dtypes of the outputs, for both versions."""

from __future__ import annotations

import torch

from ....operator import TensorMeta
from .call import Call


def output_metas(call: Call) -> tuple[TensorMeta, TensorMeta]:
    """attention_out in the output layout and lse (float32); shape arithmetic only."""
    q, size = call.q, call.value_size
    letters = {"N": q.heads, "D": size, "H": q.heads * size}
    letters |= {"T": q.length} if call.packed else {"B": q.batch, "S": q.length}
    shape = tuple(letters[letter] for letter in call.target)
    rows = (q.length, q.heads, 1) if call.packed else (q.batch, q.heads, q.length, 1)
    lse = TensorMeta(rows if call.lse else (0,), torch.float32)
    return TensorMeta(shape, _out_dtype(call)), lse


def _out_dtype(call: Call) -> torch.dtype:
    if call.out_scale is not None:
        return torch.int8
    if call.query.dtype != torch.int8:
        return call.query.dtype
    return torch.float16 if call.query_rope is None else call.query_rope.dtype
