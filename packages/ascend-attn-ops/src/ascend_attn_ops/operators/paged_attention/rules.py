"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.cache_rules import Rows, neither_form, nz_only, plain_only
from .._shared.findings import (
    first_element,
    strided,
    unequal_dtypes,
    wrong_dtype,
    wrong_rank,
    wrong_shape,
)
from .arguments import PagedAttentionArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
_FLOATS = ("query", "key_cache", "value_cache", "out")


@rule("heads")
def _heads(a: Args, ctx: RuleContext) -> str | None:
    legal = a.num_kv_heads > 0 and a.num_heads > 0 and a.num_heads % a.num_kv_heads == 0
    return None if legal else f"{a.num_heads} heads for {a.num_kv_heads} key/value heads"


@rule("rank")
def _rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("query", "out"), 3)


@rule("cache_rank")
def _cache_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("key_cache", "value_cache"), 4)


@rule("table_rank")
def _table_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("block_table",), 2)


@rule("lens_rank")
def _lens_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("context_lens",), 1)


@rule("integers")
def _integers(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("block_table", "context_lens"), ("int32",))


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, _FLOATS, ctx.limits["float_dtypes"])


@rule("half")
def _half(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("query",), ctx.limits["half_dtypes"])


@rule("product_dtype")
def _product_dtype(a: Args, ctx: RuleContext) -> str | None:
    name = dtype_name(a.query.dtype)
    return name if name == "bfloat16" else None


@rule("same_dtype")
def _same_dtype(a: Args, ctx: RuleContext) -> str | None:
    return unequal_dtypes(a, _FLOATS)


@rule("query_heads")
def _query_heads(a: Args, ctx: RuleContext) -> Finding | None:
    tokens, _, size = a.query.shape
    return wrong_shape(a, {"query": (tokens, a.num_heads, size)})


@rule("out_shape")
def _out_shape(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_shape(a, {"out": (a.query.shape[0], a.num_heads, a.out.shape[2])})


@rule("cache_shape")
def _cache_shape(a: Args, ctx: RuleContext) -> Finding | None:
    sizes = (("key_cache", a.query.shape[2]), ("value_cache", a.out.shape[2]))
    rows = [Rows(name, a.num_kv_heads, size) for name, size in sizes]
    return neither_form(a, rows, a.query.element_size(), ctx.limits["nz_bytes"])


@rule("one_row_per_request")
def _one_row_per_request(a: Args, ctx: RuleContext) -> Finding | None:
    tokens, width = a.query.shape[0], a.block_table.shape[1]
    found = wrong_shape(a, {"block_table": (tokens, width), "context_lens": (tokens,)})
    if found is None:
        return None
    return Finding(f"{found.found} for {tokens} query rows", parameter=found.parameter)


@rule("nz_caches")
def _nz_caches(a: Args, ctx: RuleContext) -> str | None:
    return nz_only(a)


@rule("plain_caches")
def _plain_caches(a: Args, ctx: RuleContext) -> str | None:
    return plain_only(a)


@rule("block_size")
def _block_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.block_size
    return None if size and size % ctx.limits["block_multiple"] == 0 else str(size)


@rule("contiguous")
def _contiguous(a: Args, ctx: RuleContext) -> str | None:
    return strided(a, (*_FLOATS, "block_table"))


@rule("lengths")
def _lengths(a: Args, ctx: RuleContext) -> str | None:
    longest = a.block_table.shape[1] * a.block_size
    wrong = (a.context_lens < 1) | (a.context_lens > longest)
    found = first_element("context_lens", a.context_lens, wrong)
    return found and f"{found} with room for {longest}"


@rule("block_range")
def _block_range(a: Args, ctx: RuleContext) -> str | None:
    blocks = (a.context_lens + a.block_size - 1) // a.block_size
    read = torch.arange(a.block_table.shape[1]) < blocks[:, None]
    beyond = (a.block_table < 0) | (a.block_table >= a.key_cache.shape[0])
    found = first_element("block_table", a.block_table, read & beyond)
    return found and f"{found} of {a.key_cache.shape[0]} blocks"
