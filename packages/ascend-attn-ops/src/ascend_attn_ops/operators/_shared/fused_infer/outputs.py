"""Shapes and dtypes of the outputs, for both versions."""

from __future__ import annotations

import attrs
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


@attrs.frozen(eq=False)
class Results:
    """Outputs of a call by query row, filled in parts; rows without keys stay as they are here.

    Attributes:
        call: The call.
        out: (rows, N, VD) zeros.
        lse: (rows, N) float32, +inf.
    """

    call: Call
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, call: Call, rows: int, dtype: torch.dtype) -> Results:
        """No row is computed yet."""
        out = torch.zeros(rows, call.heads, call.value_size, dtype=dtype)
        return cls(call, out, torch.full((rows, call.heads), float("inf"), dtype=torch.float32))

    def put(self, rows: torch.Tensor, part: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Write outputs [r, N, VD] and lse [r, N] (-inf: no keys) of these rows [r].

        The lse may be None where the call neither wants it nor has a sink.
        """
        if lse is not None and self.call.sink is not None:  # it only enlarges the denominator
            part = part * torch.sigmoid(lse - self.call.sink.to(lse.dtype))[..., None]
        self.out[rows] = part.to(self.out.dtype)
        if lse is not None and self.call.lse:
            self.lse[rows] = lse.masked_fill(lse.isneginf(), float("inf")).float()
