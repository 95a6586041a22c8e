"""Which arguments the providers take, and the vendor call as data."""

from __future__ import annotations

from ...arguments import parameters
from ...operator import NpuCall
from .arguments import FusedInferAttentionScoreArguments as Args

_DENSE = frozenset(
    {
        "query",
        "key",
        "value",
        "atten_mask",
        "actual_seq_lengths",
        "actual_seq_lengths_kv",
        "block_table",
    }
)


def host_gap(a: Args) -> str | None:
    """Tensors that the host providers do not implement."""
    extra = [
        p.name
        for p in parameters(Args)
        if p.kind in ("tensor", "ints") and p.name not in _DENSE and getattr(a, p.name) is not None
    ]
    return f"{', '.join(extra)} not implemented on the host" if extra else None


def torch_npu_call(a: Args) -> NpuCall:
    """Every argument that differs from the schema's default, by name."""
    kwargs = {
        p.name: list(value) if p.kind == "ints" else value
        for p in parameters(Args)
        if p.keyword_only
        and (value := getattr(a, p.name)) is not None
        and (p.kind == "tensor" or value != p.default)
    }
    return NpuCall("npu_fused_infer_attention_score", (a.query, a.key, a.value), kwargs)
