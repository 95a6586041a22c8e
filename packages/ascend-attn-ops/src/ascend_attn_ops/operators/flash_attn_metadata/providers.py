"""The vendor call as data."""

from __future__ import annotations

from ...arguments import parameters
from ...operator import NpuCall
from .arguments import FlashAttnMetadataArguments as Args


def cann_ops_transformer_call(a: Args) -> NpuCall:
    """Everything by name; mask mode, windows, lengths and layouts are never left to the dispatcher.

    It would read a missing mask_mode as 1, which the operator refuses, and pass a missing
    max_seqlen_q on unchanged.
    """
    layouts = dict(zip(("layout_q", "layout_kv", "layout_out"), a.layouts, strict=True))
    windows = dict(zip(("win_left", "win_right"), a.windows, strict=True))
    longest = dict(zip(("max_seqlen_q", "max_seqlen_kv"), a.longest, strict=True))
    lengths = {p.name: getattr(a, p.name) for p in parameters(Args) if p.kind == "tensor"}
    given = {name: tensor for name, tensor in lengths.items() if tensor is not None}
    settled = {"batch_size": a.requests, "mask_mode": a.mask_mode or 0}
    return NpuCall(
        "flash_attn_metadata",
        (a.num_heads_q, a.num_heads_kv, a.head_dim),
        given | settled | longest | windows | layouts,
    )
