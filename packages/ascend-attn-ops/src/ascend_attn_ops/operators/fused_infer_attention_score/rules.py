"""Predicates of the rules that only version 1 has."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.fused_infer.call import Call
from .._shared.fused_infer.load import load_contract
from .arguments import FusedInferAttentionScoreArguments as Args

LEGACY_SCALES = ("dequant_scale1", "quant_scale1", "dequant_scale2")


def _prefix_pair(c: Call, ctx: RuleContext) -> str | None:
    key, value = c.prefix
    if (key is None) != (value is None):
        return f"{'value' if key is None else 'key'}_shared_prefix alone"
    for prefix in c.prefix:
        if prefix is not None and prefix.dim() != len(c.base):
            return f"rank {prefix.dim()} {list(prefix.shape)} in {c.base}"
    return None


def _prefix_use(c: Call, ctx: RuleContext) -> str | None:
    if not c.prefixed:
        return None
    used = {"block_table": c.paged, c.layout: c.packed, "query_rope": c.rope}
    return ", ".join(name for name, given in used.items() if given) or None


def _prefix_shape(c: Call, ctx: RuleContext) -> Finding | None:
    key, value = c.prefix
    if key is None or value is None:
        return None
    length = c.key_shape(key).length
    names = ("key_shared_prefix", "value_shared_prefix")
    for name, prefix, beside, like in zip(
        names, (key, value), (c.first_key, c.first_value), (c.k, c.v), strict=True
    ):
        shape = c.key_shape(prefix)
        found = (shape.batch, shape.length, shape.heads, shape.size)
        if found != (1, length, like.heads, like.size) or prefix.dtype != beside.dtype:
            return Finding(f"{dtype_name(prefix.dtype)}{list(prefix.shape)}", parameter=name)
    return None


def _prefix_length(c: Call, ctx: RuleContext) -> str | None:
    lengths, (key, _) = c.prefix_lens, c.prefix
    if lengths is None or key is None:
        return None
    room = c.key_shape(key).length
    legal = len(lengths) == 1 and 0 <= lengths[0] <= room
    return None if legal else f"{list(lengths)} for a prefix of {room}"


def _padding(c: Call, ctx: RuleContext) -> str | None:
    sides = zip(("query", "kv"), c.padding, (c.q_lens, c.kv_lens), strict=True)
    for name, size, lengths in sides:
        if size is None:
            continue
        if not lengths:
            return f"{name}_padding_size without lengths"
        if c.paged or c.packed:
            return f"{name}_padding_size with {'block_table' if c.paged else c.layout}"
    return None


def _int8_query(c: Call, ctx: RuleContext) -> str | None:
    given = [name for name in LEGACY_SCALES if name in c.other_quant]
    if c.query.dtype == torch.int8:
        return None if len(given) == len(LEGACY_SCALES) else f"only {given}"
    return f"{given} for {dtype_name(c.query.dtype)}" if given else None


CONTRACT: Contract[Args] = load_contract(
    __package__,
    {
        "prefix_pair": _prefix_pair,
        "prefix_use": _prefix_use,
        "prefix_shape": _prefix_shape,
        "prefix_length": _prefix_length,
        "padding": _padding,
        "int8_query": _int8_query,
    },
)
