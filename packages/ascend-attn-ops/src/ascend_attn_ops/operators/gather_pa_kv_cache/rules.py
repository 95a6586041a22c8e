"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...contract import Contract, Finding, RuleContext
from .._shared.cache_rules import nz_pieces, unequal_rows
from .._shared.findings import (
    first_element,
    strided,
    unequal_dtypes,
    wrong_dtype,
    wrong_rank,
    wrong_shape,
)
from .._shared.formats import FRACTAL_NZ, storage_format
from .arguments import GatherPaKvCacheArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
_INTEGERS = ("block_tables", "seq_lens", "seq_offset")
_TENSORS = ("key_cache", "value_cache", "key", "value")


@rule("cache_rank")
def _cache_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("key_cache", "value_cache"), 4)


@rule("rows_rank")
def _rows_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("key", "value"), 3)


@rule("table_rank")
def _table_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("block_tables",), 2)


@rule("length_rank")
def _length_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("seq_lens", "seq_offset"), 1)


@rule("integers")
def _integers(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, _INTEGERS, ctx.limits["integer_dtypes"])


@rule("one_integer_dtype")
def _one_integer_dtype(a: Args, ctx: RuleContext) -> str | None:
    return unequal_dtypes(a, _INTEGERS)


@rule("same_dtype")
def _same_dtype(a: Args, ctx: RuleContext) -> str | None:
    return unequal_dtypes(a, _TENSORS)


@rule("same_rows")
def _same_rows(a: Args, ctx: RuleContext) -> str | None:
    return unequal_rows(a.key, a.value)


@rule("cache_shape")
def _cache_shape(a: Args, ctx: RuleContext) -> Finding | None:
    if a.is_nd:
        return None
    for name, rows in (("key_cache", a.key), ("value_cache", a.value)):
        cache: torch.Tensor = getattr(a, name)
        heads, size = rows.shape[1:]
        pieces, inner = nz_pieces(heads, size, rows.element_size(), ctx.limits["nz_bytes"])
        if (cache.shape[1], cache.shape[3]) != (pieces, inner):
            plain = f"[num_blocks, block_size, {heads}, {size}]"
            nz = f"NZ [num_blocks, {pieces}, block_size, {inner}]"
            return Finding(str(list(cache.shape)), f"{plain} or {nz}", name)
    return None


@rule("same_blocks")
def _same_blocks(a: Args, ctx: RuleContext) -> str | None:
    token = 1 if a.is_nd else 2
    key, value = ((c.shape[0], c.shape[token]) for c in (a.key_cache, a.value_cache))
    return None if key == value else f"key_cache {list(key)}, value_cache {list(value)}"


@rule("length_count")
def _length_count(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_shape(a, {"seq_lens": (a.block_tables.shape[0] + a.is_seq_lens_cumsum,)})


@rule("offset_count")
def _offset_count(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_shape(a, {"seq_offset": (a.block_tables.shape[0],)})


@rule("contiguous")
def _contiguous(a: Args, ctx: RuleContext) -> str | None:
    return strided(a, _TENSORS)


@rule("lengths")
def _lengths(a: Args, ctx: RuleContext) -> str | None:
    if not a.is_seq_lens_cumsum:
        return first_element("seq_lens", a.seq_lens, a.seq_lens < 0)
    falls = torch.zeros_like(a.seq_lens, dtype=torch.bool)
    falls[1:] = a.seq_lens.diff() < 0
    falls[:1] = a.seq_lens[:1] != 0
    return first_element("seq_lens", a.seq_lens, falls)


@rule("rows_fit")
def _rows_fit(a: Args, ctx: RuleContext) -> str | None:
    total = int(a.lengths().sum())
    return f"{a.key.shape[0]} rows for {total} tokens" if total > a.key.shape[0] else None


def _columns_read(a: Args) -> torch.Tensor:
    """(B, 2) int64: first column and column after the last one that is read."""
    first = a.first_columns()
    blocks = (a.lengths() + a.block_size - 1) // a.block_size
    return torch.stack((first, first + blocks), 1)


@rule("table_width")
def _table_width(a: Args, ctx: RuleContext) -> str | None:
    width = a.block_tables.shape[1]
    first, end = _columns_read(a).unbind(1)
    beyond = ((first < 0) | (end > width)).logical_and(end > first).nonzero().flatten().tolist()
    if not beyond:
        return None
    request = beyond[0]
    return f"request {request} reads columns {first[request]}..{end[request] - 1} of {width}"


@rule("block_range")
def _block_range(a: Args, ctx: RuleContext) -> str | None:
    column = torch.arange(a.block_tables.shape[1])
    first, end = _columns_read(a).unbind(1)
    read = (column >= first[:, None]) & (column < end[:, None])
    beyond = (a.block_tables >= a.key_cache.shape[0]) | (a.block_tables < -1)
    return first_element("block_tables", a.block_tables, read & beyond)


@rule("whole_blocks")
def _whole_blocks(a: Args, ctx: RuleContext) -> str | None:
    if a.seq_offset is None:
        return None
    return first_element("seq_offset", a.seq_offset, a.seq_offset % a.block_size != 0)


@rule("cache_format")
def _cache_format(a: Args, ctx: RuleContext) -> Finding | None:
    if a.is_nd:
        return None
    for name, cache in (("key_cache", a.key_cache), ("value_cache", a.value_cache)):
        found = storage_format(cache)
        if found not in (None, FRACTAL_NZ):
            return Finding(f"format {found}", parameter=name)
    return None
