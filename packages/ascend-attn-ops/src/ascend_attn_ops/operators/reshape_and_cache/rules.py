"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.findings import (
    first_element,
    strided,
    unequal_dtypes,
    wrong_dtype,
    wrong_rank,
    wrong_shape,
)
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
    if a.key.shape[:2] == a.value.shape[:2]:
        return None
    return f"key {list(a.key.shape)}, value {list(a.value.shape)}"


@rule("slot_count")
def _slot_count(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_shape(a, {"slot_indices": (a.key.shape[0],)})


@rule("cache_shape")
def _cache_shape(a: Args, ctx: RuleContext) -> Finding | None:
    blocks, plain_size, nz_size = a.key_cache.shape[:3]
    for name, rows in (("key_cache", a.key), ("value_cache", a.value)):
        plain = (blocks, plain_size, *rows.shape[1:])
        nz = (blocks, *_nz_shape(rows, nz_size, ctx.limits["nz_bytes"]))
        shape = tuple(getattr(a, name).shape)
        if shape != (plain if a.is_nd else nz):
            both = f"{list(plain)} or NZ {list(nz)}, both caches in one form"
            return Finding(str(list(shape)), both, name)
    return None


def _nz_shape(rows: torch.Tensor, block_size: int, nz_bytes: int) -> tuple[int, int, int]:
    inner = nz_bytes // rows.element_size()
    return -(-rows.shape[1] * rows.shape[2] // inner), block_size, inner


@rule("nz_caches")
def _nz_caches(a: Args, ctx: RuleContext) -> str | None:
    return f"plain caches {list(a.key_cache.shape)}" if a.is_nd else None


@rule("plain_caches")
def _plain_caches(a: Args, ctx: RuleContext) -> str | None:
    return None if a.is_nd else f"{list(a.key_cache.shape)}"


@rule("contiguous")
def _contiguous(a: Args, ctx: RuleContext) -> str | None:
    return strided(a, _TENSORS)


@rule("slot_range")
def _slot_range(a: Args, ctx: RuleContext) -> str | None:
    slots = a.key_cache.shape[0] * a.as_scatter().block_size
    found = first_element("slot_indices", a.slot_indices, a.slot_indices >= slots)
    return found and f"{found} of {slots} slots"


@rule("slot_unique")
def _slot_unique(a: Args, ctx: RuleContext) -> str | None:
    values, counts = a.slot_indices[a.slot_indices >= 0].unique(return_counts=True)
    twice = values[counts > 1]
    return f"slot {int(twice[0])} {int(counts[counts > 1][0])} times" if twice.numel() else None
