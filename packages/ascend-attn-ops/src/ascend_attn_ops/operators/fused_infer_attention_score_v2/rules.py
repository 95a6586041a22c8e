"""Predicates of the rules that only version 2 has."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, RuleContext
from .._shared.fused_infer.call import TREE_MODE, Call
from .._shared.fused_infer.load import load_contract
from .arguments import FusedInferAttentionScoreV2Arguments as Args


def _sink_shape(c: Call, ctx: RuleContext) -> str | None:
    if c.sink is None or tuple(c.sink.shape) == (c.heads,):
        return None
    return f"{list(c.sink.shape)} for {c.heads} heads"


def _sink_dtype(c: Call, ctx: RuleContext) -> str | None:
    if c.sink is None or c.sink.dtype == torch.bfloat16:
        return None
    return dtype_name(c.sink.dtype)


def _sink_layout(c: Call, ctx: RuleContext) -> str | None:
    classic = ctx.family in ctx.limits["classic_families"]
    allowed = ctx.limits["sink_layouts_classic" if classic else "sink_layouts"]
    return None if c.sink is None or c.layout in allowed else c.layout


def _sink_extras(c: Call, ctx: RuleContext) -> str | None:
    if c.sink is None:
        return None
    quantised = (c.key_scale, c.value_scale, c.query_scale, c.out_scale)
    extras = {
        f"value heads of {c.v.size}": (c.v.size or 0) > ctx.limits["sink_value_size"],
        "quantisation": any(scale is not None for scale in quantised),
        "pse_shift": c.pse is not None,
        "query_rope": c.rope,
    }
    return ", ".join(name for name, given in extras.items() if given) or None


def _sink_lse(c: Call, ctx: RuleContext) -> str | None:
    return "an lse beside a sink" if c.sink is not None and c.lse else None


def _tree_rope(c: Call, ctx: RuleContext) -> str | None:
    if c.mode != TREE_MODE:
        return None
    nz_int8 = c.paged and c.k.form == "NZ" and c.first_key.dtype == torch.int8
    if not c.rope and not nz_int8:
        return "mode 9 without ropes"
    extras = {"pse_shift": c.pse is not None, "quant_scale_out": c.out_scale is not None}
    return ", ".join(name for name, given in extras.items() if given) or None


def _tree_mask(c: Call, ctx: RuleContext) -> str | None:
    if c.mode != TREE_MODE or c.mask is None:
        return None
    want: tuple[int, ...] = (c.q.batch, c.q.length, c.q.length)
    if c.packed:
        ends = c.q_lens or ()
        squares = ((e - s) ** 2 for s, e in zip((0, *ends), ends, strict=False))
        want = (sum(squares),)
    return None if tuple(c.mask.shape) == want else f"{list(c.mask.shape)} for {list(want)}"


def _tree_lengths(c: Call, ctx: RuleContext) -> str | None:
    if c.mode != TREE_MODE or c.packed:
        return None
    rows, keys = c.lengths(c.q_lens, c.q.length), c.lengths(c.kv_lens, c.capacity)
    short = [i for i, (q, k) in enumerate(zip(rows, keys, strict=True)) if k < q]
    return f"{keys[short[0]]} keys for {rows[short[0]]} rows" if short else None


def _int8_query(c: Call, ctx: RuleContext) -> str | None:
    if c.query.dtype != torch.int8:
        return "dequant_scale_query without an int8 query" if c.query_scale is not None else None
    scales = (c.query_scale, c.key_scale, c.value_scale)
    if not all(scale is not None and scale.dtype == torch.float32 for scale in scales):
        return "not all three float32 scales"
    if (c.query_mode, c.key_mode, c.value_mode) != (ctx.limits["int8_query_mode"], 0, 0):
        return f"quant modes {c.query_mode}, {c.key_mode}, {c.value_mode}"
    return None if c.paged and c.k.form == "NZ" else "keys that are no NZ cache"


CONTRACT: Contract[Args] = load_contract(
    __package__,
    {
        "sink_shape": _sink_shape,
        "sink_dtype": _sink_dtype,
        "sink_layout": _sink_layout,
        "sink_extras": _sink_extras,
        "sink_lse": _sink_lse,
        "tree_rope": _tree_rope,
        "tree_mask": _tree_mask,
        "tree_lengths": _tree_lengths,
        "int8_query": _int8_query,
    },
)
