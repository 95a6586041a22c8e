"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.cache_rules import (
    Rows,
    neither_form,
    nz_only,
    plain_only,
    slot_beyond,
    slot_written_twice,
    unequal_rows,
)
from .._shared.findings import strided, unequal_dtypes, wrong_dtype, wrong_rank, wrong_shape
from .arguments import ReshapeAndCacheArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
_TENSORS = ("key", "value", "key_cache", "value_cache")


@rule("rows_rank")
def _rows_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("key", "value"), 3)


@rule("cache_rank")
def _cache_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("key_cache", "value_cache"), 4)


@rule("slot_rank")
def _slot_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("slot_indices",), 1)


@rule("slot_dtype")
def _slot_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("slot_indices",), ("int32",))


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("key",), ctx.limits["dtypes"])


@rule("product_dtype")
def _product_dtype(a: Args, ctx: RuleContext) -> str | None:
    name = dtype_name(a.key.dtype)
    return name if name == "bfloat16" else None


@rule("same_dtype")
def _same_dtype(a: Args, ctx: RuleContext) -> str | None:
    return unequal_dtypes(a, _TENSORS)


@rule("same_tokens")
def _same_tokens(a: Args, ctx: RuleContext) -> str | None:
    return unequal_rows(a.key, a.value)


@rule("slot_count")
def _slot_count(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_shape(a, {"slot_indices": (a.key.shape[0],)})


@rule("cache_shape")
def _cache_shape(a: Args, ctx: RuleContext) -> Finding | None:
    rows = (Rows("key_cache", *a.key.shape[1:]), Rows("value_cache", *a.value.shape[1:]))
    return neither_form(a, rows, a.key.element_size(), ctx.limits["nz_bytes"])


@rule("nz_caches")
def _nz_caches(a: Args, ctx: RuleContext) -> str | None:
    return nz_only(a)


@rule("plain_caches")
def _plain_caches(a: Args, ctx: RuleContext) -> str | None:
    return plain_only(a)


@rule("contiguous")
def _contiguous(a: Args, ctx: RuleContext) -> str | None:
    return strided(a, _TENSORS)


@rule("slot_range")
def _slot_range(a: Args, ctx: RuleContext) -> str | None:
    end = a.key_cache.shape[0] * a.as_scatter().block_size
    return slot_beyond("slot_indices", a.slot_indices, end)


@rule("slot_unique")
def _slot_unique(a: Args, ctx: RuleContext) -> str | None:
    return slot_written_twice(a.slot_indices)
