"""Predicates of the rules in ``contract.toml``; version 2 of the operator shares them."""

from __future__ import annotations

import torch

from ...contract import Contract, Finding, RuleContext
from .._shared.findings import (
    given,
    strided,
    unequal_dtypes,
    wrong_dtype,
    wrong_rank,
    wrong_shape,
)
from .arguments import KvRmsnormRopeCacheArguments as Args
from .reference import token_slots

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
_CACHES = ("k_cache", "ckv_cache")
_SCALES = ("k_rope_scale", "c_kv_scale")


@rule("cache_mode")
def _cache_mode(a: Args, ctx: RuleContext) -> str | None:
    return None if a.cache_mode in ctx.limits["modes"] else repr(a.cache_mode)


@rule("offsets")
def _offsets(a: Args, ctx: RuleContext) -> str | None:
    return ", ".join(given(a, ("k_rope_offset", "c_kv_offset"))) or None


@rule("rank")
def _rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("kv", "cos", "sin", "v", *_CACHES), 4)


@rule("gamma_rank")
def _gamma_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("gamma",), 1)


@rule("index_rank")
def _index_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("index",), 1 if a.is_paged else 2)


@rule("index_dtype")
def _index_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("index",), ("int64",))


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("kv",), ctx.limits["float_dtypes"])


@rule("half")
def _half(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("kv",), ctx.limits["half_dtypes"])


@rule("scale_pair")
def _scale_pair(a: Args, ctx: RuleContext) -> str | None:
    present = list(given(a, _SCALES))
    return f"only {present[0]}" if len(present) == 1 else None


@rule("same_dtype")
def _same_dtype(a: Args, ctx: RuleContext) -> str | None:
    return unequal_dtypes(a, ("kv", "gamma", "cos", "sin", "v"))


@rule("cache_dtype")
def _cache_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    expected = a.kv.dtype if a.k_rope_scale is None else torch.int8
    for name, cache in given(a, _CACHES).items():
        if cache.dtype != expected:
            scales = "without scales" if a.k_rope_scale is None else "with scales"
            return Finding(f"{cache.dtype} {scales}", f"{expected} {scales}", name)
    return None


@rule("scales")
def _scales(a: Args, ctx: RuleContext) -> Finding | None:
    expected = {"k_rope_scale": (a.rope_size,), "c_kv_scale": (a.latent_size,)}
    return wrong_dtype(a, _SCALES, ("float32",)) or wrong_shape(a, expected)


@rule("hidden")
def _hidden(a: Args, ctx: RuleContext) -> str | None:
    heads, hidden = a.kv.shape[1], a.kv.shape[3]
    if heads == 1 and (a.v is not None or hidden == a.latent_size + a.rope_size):
        return None
    return f"{heads} heads of {hidden} for gamma {a.latent_size} and cos {a.rope_size}"


@rule("sizes")
def _sizes(a: Args, ctx: RuleContext) -> str | None:
    found = a.latent_size, a.rope_size
    legal = found == (ctx.limits["latent_size"], ctx.limits["rope_size"])
    return None if legal or a.v is not None else f"{found[0]} and {found[1]}"


@rule("values")
def _values(a: Args, ctx: RuleContext) -> str | None:
    if a.v is None or a.v.shape[:3] == a.kv.shape[:3]:
        return None
    return f"v {list(a.v.shape)}, kv {list(a.kv.shape)}"


@rule("rotary_shape")
def _rotary_shape(a: Args, ctx: RuleContext) -> Finding | None:
    if a.rope_size % 2:
        return Finding(f"Dr {a.rope_size}")
    shape = (*a.kv.shape[:3], a.rope_size)
    return wrong_shape(a, {"cos": shape, "sin": shape})


@rule("cache_shape")
def _cache_shape(a: Args, ctx: RuleContext) -> Finding | None:
    if a.v is not None:
        return None
    batch, _, tokens, _ = a.kv.shape
    blocks = a.k_cache.shape[0]
    lead = (blocks, a.block_size, 1) if a.is_paged else (batch, 1, max(a.block_size, tokens))
    expected = {"k_cache": (*lead, a.rope_size), "ckv_cache": (*lead, a.latent_size)}
    return wrong_shape(a, expected)


@rule("nz_shape")
def _nz_shape(a: Args, ctx: RuleContext) -> Finding | None:
    for name, cache in given(a, _CACHES).items():
        inner = 32 // cache.element_size()
        if a.is_nz and (cache.shape[-1] % inner or not cache.is_contiguous()):
            return Finding(f"{list(cache.shape)} strides {cache.stride()}", parameter=name)
    return None


@rule("index_count")
def _index_count(a: Args, ctx: RuleContext) -> Finding | None:
    batch, _, tokens, _ = a.kv.shape
    if not a.is_paged:
        return wrong_shape(a, {"index": (batch, tokens)})
    return wrong_shape(a, {"index": (batch * (_pages(a) if a.by_page else tokens),)})


def _pages(a: Args) -> int:
    return -(-a.kv.shape[2] // max(a.block_size, 1))


@rule("block_count")
def _block_count(a: Args, ctx: RuleContext) -> Finding | None:
    needed = a.kv.shape[0] * _pages(a)
    blocks = a.k_cache.shape[0]
    if not a.is_paged or blocks >= needed:
        return None
    return Finding(f"{blocks} blocks", f"at least {needed} blocks")


@rule("contiguous")
def _contiguous(a: Args, ctx: RuleContext) -> str | None:
    return strided(a, ("kv", *_CACHES))


@rule("index_range")
def _index_range(a: Args, ctx: RuleContext) -> str | None:
    slots = token_slots(a)
    row = torch.arange(a.kv.shape[0]).repeat_interleave(a.kv.shape[2])
    ends = (row + 1) * a.block_size
    if a.is_paged:
        ends = torch.full_like(slots, a.k_cache.shape[0] * a.block_size)
    beyond = (slots >= ends).nonzero().flatten().tolist()
    if not beyond:
        return None
    token = beyond[0]
    end = ends[token] if a.is_paged else a.block_size
    start = 0 if a.is_paged else ends[token] - a.block_size
    return f"token {token} at {int(slots[token] - start)} of {int(end)}"


@rule("index_unique")
def _index_unique(a: Args, ctx: RuleContext) -> str | None:
    slots = token_slots(a)
    values, counts = slots[slots >= 0].unique(return_counts=True)
    twice = values[counts > 1]
    return f"slot {int(twice[0])} {int(counts[counts > 1][0])} times" if twice.numel() else None
