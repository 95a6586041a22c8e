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
from .arguments import SparseFlashAttentionArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
add_sequence_rules(CONTRACT)
add_selection_rules(CONTRACT)


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("query",), ctx.limits["host_dtypes"])


@rule("half")
def _half(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("query",), ctx.limits["half_dtypes"])


@rule("not_empty")
def _not_empty(a: Args, ctx: RuleContext) -> str | None:
    named = (("query", a.query), ("key", a.key), ("value", a.value))
    return empty_tensors((*named, ("sparse_indices", a.sparse_indices)))


@rule("value_given")
def _value_given(a: Args, ctx: RuleContext) -> str | None:
    return "nothing" if a.value is None else None


@rule("rope_given")
def _rope_given(a: Args, ctx: RuleContext) -> str | None:
    given = {"query_rope": a.query_rope, "key_rope": a.key_rope}
    missing = [name for name, tensor in given.items() if tensor is None]
    return f"no {' and no '.join(missing)}" if missing else None


def _heads(a: Args) -> int:
    return a.query.shape[-2]


@rule("heads_a5")
def _heads_a5(a: Args, ctx: RuleContext) -> str | None:
    return None if 1 <= _heads(a) <= ctx.limits["max_heads"] else str(_heads(a))


@rule("heads_a2_a3")
def _heads_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    heads, limits = _heads(a), ctx.limits
    legal = 1 <= heads <= limits["max_group"] or heads == limits["max_heads"]
    return None if legal else str(heads)


@rule("head_size")
def _head_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.query.shape[-1]
    return None if size == ctx.limits["head_size"] else str(size)


@rule("rope_size")
def _rope_size(a: Args, ctx: RuleContext) -> str | None:
    last = None if a.query_rope is None else a.query_rope.shape[-1:]
    if last == (ctx.limits["rope_size"],):
        return None
    return str(last[0]) if last else "none"


@rule("sinks_product")
def _sinks_product(a: Args, ctx: RuleContext) -> str | None:
    return None if a.sinks is None else shape_of(a.sinks)


@rule("same_dtype")
def _same_dtype(a: Args, ctx: RuleContext) -> str | None:
    return unequal_dtypes(a, ("query", "key", "value", "query_rope", "key_rope"))


@rule("key_size")
def _key_size(a: Args, ctx: RuleContext) -> str | None:
    if a.key.shape[-1] == a.query.shape[-1]:
        return None
    return f"{a.key.shape[-1]} for a query of {a.query.shape[-1]}"


@rule("value_shape")
def _value_shape(a: Args, ctx: RuleContext) -> str | None:
    if a.value is None or a.value.shape == a.key.shape:
        return None
    return f"{shape_of(a.value)} for key {shape_of(a.key)}"


@rule("rope_shape")
def _rope_shape(a: Args, ctx: RuleContext) -> Finding | None:
    assert a.query_rope is not None  # noqa: S101 - an earlier rule
    assert a.key_rope is not None  # noqa: S101 - an earlier rule
    size = a.query_rope.shape[-1:]
    pairs = (("query_rope", a.query_rope, a.query), ("key_rope", a.key_rope, a.key))
    for name, rope, latent in pairs:
        expected = latent.shape[:-1] + size
        if rope.shape != expected:
            return Finding(shape_of(rope), allowed=str(list(expected)), parameter=name)
    return None


@rule("sinks")
def _sinks(a: Args, ctx: RuleContext) -> str | None:
    if a.sinks is None:
        return None
    if a.sinks.dtype == torch.float32 and a.sinks.shape == (_heads(a),):
        return None
    return f"{dtype_name(a.sinks.dtype)}{shape_of(a.sinks)} for {_heads(a)} heads"


@rule("cache_strides")
def _cache_strides(a: Args, ctx: RuleContext) -> str | None:
    caches = {"key": a.key, "value": a.value, "key_rope": a.key_rope}
    free = ctx.family in ctx.limits["strided_families"]
    return strided(caches, a.layout_kv, free_axis=free)


@rule("value_is_key")
def _value_is_key(a: Args, ctx: RuleContext) -> str | None:
    if a.value is None or a.value.data_ptr() == a.key.data_ptr():
        return None
    differs = (a.value != a.key).nonzero()
    if not differs.numel():
        return None
    return f"another tensor, first different element at {differs[0].tolist()}"
