"""The vendor call as data."""

from __future__ import annotations

from ...arguments import parameters
from ...operator import NpuCall
from .arguments import FlashAttnArguments as Args

_POSITIONAL = ("q", "k", "v")


def cann_ops_transformer_call(a: Args) -> NpuCall:
    """Everything but q, k and v by name: the documents print another order than the schema has.

    Lengths, masks and layouts are always named, so that the call and its plan say the same.
    """
    kwargs = {
        p.name: value
        for p in parameters(Args)
        if p.name not in _POSITIONAL and (value := getattr(a, p.name)) is not None
    }
    if not a.has_sinks:
        kwargs.pop("sinks", None)
    return NpuCall("flash_attn", (a.q, a.k, a.v), kwargs)
