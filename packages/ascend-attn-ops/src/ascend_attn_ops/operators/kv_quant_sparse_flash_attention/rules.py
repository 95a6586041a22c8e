"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.findings import unequal_dtypes, wrong_dtype
from .._shared.selection_rules import add_selection_rules
from .._shared.sequence_rules import (
    add_sequence_rules,
    empty_tensors,
    shape_of,
    strided,
)
from .arguments import KvQuantSparseFlashAttentionArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
add_sequence_rules(CONTRACT)
add_selection_rules(CONTRACT)


def _hifloat8(a: Args) -> bool:
    return a.key_dtype is not None or a.key.dtype == torch.uint8


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("query",), ctx.limits["half_dtypes"])


@rule("kv_dtype")
def _kv_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("key",), ctx.limits["kv_dtypes"])


@rule("kv_dtype_a2_a3")
def _kv_dtype_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    if a.key.dtype == torch.int8 and not _hifloat8(a):
        return None
    return "hifloat8" if _hifloat8(a) else dtype_name(a.key.dtype)


@rule("not_empty")
def _not_empty(a: Args, ctx: RuleContext) -> str | None:
    named = (("query", a.query), ("key", a.key), ("value", a.value))
    return empty_tensors((*named, ("sparse_indices", a.sparse_indices)))


@rule("quant_modes")
def _quant_modes(a: Args, ctx: RuleContext) -> str | None:
    modes = {"key_quant_mode": a.key_quant_mode, "value_quant_mode": a.value_quant_mode}
    wrong = [f"{n} {v}" for n, v in modes.items() if v != ctx.limits["quant_mode"]]
    return ", ".join(wrong) or None


@rule("no_scales")
def _no_scales(a: Args, ctx: RuleContext) -> str | None:
    scales = {"key": a.key_dequant_scale, "value": a.value_dequant_scale}
    wrong = [f"{n}_dequant_scale {shape_of(t)}" for n, t in scales.items() if t is not None]
    return ", ".join(wrong) or None


@rule("packing")
def _packing(a: Args, ctx: RuleContext) -> str | None:
    only = ("quant_scale_repo_mode", "tile_size", "rope_head_dim")
    found = {name: getattr(a, name) for name in only}
    return ", ".join(f"{n} {v}" for n, v in found.items() if v != ctx.limits[n]) or None


@rule("query_size")
def _query_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.query.shape[-1]
    return None if size == ctx.limits["query_size"] else str(size)


@rule("row_size")
def _row_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.key.shape[-1]
    return None if size == ctx.limits["row_size"] else str(size)


@rule("heads_a2_a3")
def _heads_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    heads = a.query.shape[-2]
    return None if heads in ctx.limits["heads_a2_a3"] else str(heads)


@rule("heads_a5")
def _heads_a5(a: Args, ctx: RuleContext) -> str | None:
    heads = a.query.shape[-2]
    return None if heads in ctx.limits["heads_a5"] else str(heads)


@rule("hifloat8_count")
def _hifloat8_count(a: Args, ctx: RuleContext) -> str | None:
    count = a.sparse_indices.shape[-1]
    wrong = _hifloat8(a) and count != ctx.limits["hifloat8_count"]
    return str(count) if wrong else None


@rule("same_dtype")
def _same_dtype(a: Args, ctx: RuleContext) -> str | None:
    if a.key_dtype != a.value_dtype:
        return f"key_dtype {a.key_dtype}, value_dtype {a.value_dtype}"
    return unequal_dtypes(a, ("key", "value"))


@rule("value_shape")
def _value_shape(a: Args, ctx: RuleContext) -> str | None:
    if a.value.shape == a.key.shape:
        return None
    return f"{shape_of(a.value)} for key {shape_of(a.key)}"


@rule("cache_strides")
def _cache_strides(a: Args, ctx: RuleContext) -> str | None:
    free = ctx.family in ctx.limits["strided_families"]
    return strided({"key": a.key, "value": a.value}, a.layout_kv, free_axis=free)


@rule("value_is_key")
def _value_is_key(a: Args, ctx: RuleContext) -> str | None:
    if a.value.data_ptr() == a.key.data_ptr():
        return None
    differs = (a.value.view(torch.uint8) != a.key.view(torch.uint8)).nonzero()
    if not differs.numel():
        return None
    return f"another tensor, first different byte at {differs[0].tolist()}"
