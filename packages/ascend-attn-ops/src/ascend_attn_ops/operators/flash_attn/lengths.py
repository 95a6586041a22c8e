"""Where each request's rows are, and how many count; read from the length tensors."""

from __future__ import annotations

import attrs
import torch

from .._shared.flash_attn import size_of
from .arguments import FlashAttnArguments as Args


@attrs.frozen(eq=False)
class Side:
    """Rows of all requests of the queries or of the keys; host int64 tensors.

    Attributes:
        start: (B,) first row in the flat token axis (TND), or 0.
        room: (B,) rows that there are: of the segment, of S, or of the block table.
        length: (B,) rows that count: ``seqused`` within ``room``.
    """

    start: torch.Tensor
    room: torch.Tensor
    length: torch.Tensor


def query_side(a: Args) -> Side:
    """Rows of the queries."""
    room = None if a.layout_q == "TND" else size_of(a.q, a.layout_q, "S")
    return _side(a.requests, a.cu_seqlens_q, a.seqused_q, room)


def kv_side(a: Args) -> Side:
    """Rows of the keys."""
    if a.block_table is not None:
        room: int | None = a.block_table.shape[1] * a.block_size
    else:
        room = None if a.layout_kv == "TND" else size_of(a.k, a.layout_kv, "S")
    return _side(a.requests, a.cu_seqlens_kv, a.seqused_kv, room)


def _side(
    requests: int, ends: torch.Tensor | None, used: torch.Tensor | None, room: int | None
) -> Side:
    if ends is not None and room is None:
        bounds = ends.detach().long().cpu()
        start, rooms = bounds[:-1], bounds.diff()
    else:
        start = torch.zeros(requests, dtype=torch.long)
        rooms = torch.full((requests,), room or 0)
    length = rooms if used is None else torch.minimum(used.detach().long().cpu(), rooms)
    return Side(start, rooms, length.clamp(min=0))
