"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.cache_rules import nz_pieces, slot_beyond, slot_written_twice, unequal_rows
from .._shared.findings import strided, unequal_dtypes, wrong_dtype, wrong_rank
from .arguments import ScatterPaKvCacheArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
_TENSORS = ("key", "value", "key_cache", "value_cache")


def _compressing(a: Args) -> bool:
    return a.compress_lens is not None and a.seq_lens is not None


@rule("key_rank")
def _key_rank(a: Args, ctx: RuleContext) -> str | None:
    expected = 4 if _compressing(a) else 3
    return None if a.key.dim() == expected else f"rank {a.key.dim()} ({list(a.key.shape)})"


@rule("value_rank")
def _value_rank(a: Args, ctx: RuleContext) -> str | None:
    return None if a.value.dim() == a.key.dim() else f"rank {a.value.dim()}"


@rule("slot_rank")
def _slot_rank(a: Args, ctx: RuleContext) -> str | None:
    expected = 2 if _compressing(a) else 1
    return None if a.slot_mapping.dim() == expected else f"rank {a.slot_mapping.dim()}"


@rule("slot_dtype")
def _slot_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("slot_mapping",), ctx.limits["slot_dtypes"])


@rule("cache_rank")
def _cache_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("key_cache", "value_cache"), 4)


@rule("cache_mode")
def _cache_mode(a: Args, ctx: RuleContext) -> str | None:
    return None if a.cache_mode in (None, "Norm", "PA_NZ") else repr(a.cache_mode)


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("key",), ctx.limits["dtypes"])


@rule("same_dtype")
def _same_dtype(a: Args, ctx: RuleContext) -> str | None:
    return unequal_dtypes(a, _TENSORS)


@rule("same_tokens")
def _same_tokens(a: Args, ctx: RuleContext) -> str | None:
    return unequal_rows(a.key, a.value)


@rule("slot_count")
def _slot_count(a: Args, ctx: RuleContext) -> str | Finding | None:
    heads = a.key.shape[2] if _compressing(a) else None
    expected = (a.key.shape[0],) if heads is None else (a.key.shape[0], heads)
    if tuple(a.slot_mapping.shape) == expected:
        return None
    return Finding(f"{list(a.slot_mapping.shape)}", allowed=f"{list(expected)}")


@rule("cache_shape")
def _cache_shape(a: Args, ctx: RuleContext) -> Finding | None:
    for name, tokens in (("key_cache", a.key), ("value_cache", a.value)):
        cache: torch.Tensor = getattr(a, name)
        expected = _expected_shape(a, tokens, ctx.limits["nz_bytes"])
        if tuple(cache.shape) != expected:
            hint = "" if a.is_nz is False else ' (for ordinary caches pass cache_mode="Norm")'
            return Finding(
                f"{list(cache.shape)} in mode {a.cache_mode}",
                allowed=f"{list(expected)}{hint}",
                parameter=name,
            )
    return None


def _expected_shape(a: Args, tokens: torch.Tensor, nz_bytes: int) -> tuple[int, ...]:
    blocks = a.key_cache.shape[0]
    heads, size = tokens.shape[-2:]
    if _compressing(a):
        heads = 1
    if not a.is_nz:
        return (blocks, a.key_cache.shape[1], heads, size)
    pieces, inner = nz_pieces(heads, size, tokens.element_size(), nz_bytes)
    return (blocks, pieces, a.key_cache.shape[2], inner)


@rule("compress_lengths")
def _compress_lengths(a: Args, ctx: RuleContext) -> str | None:
    given = {
        "compress_lens": a.compress_lens,
        "compress_seq_offsets": a.compress_seq_offsets,
        "seq_lens": a.seq_lens,
    }
    present = [name for name, tensor in given.items() if tensor is not None]
    if len(present) not in (0, 3):
        return f"only {', '.join(present)}"
    wrong = [
        f"{name} {dtype_name(t.dtype)}"
        for name, t in given.items()
        if t is not None and t.dtype != a.slot_mapping.dtype
    ]
    return ", ".join(wrong) or None


@rule("contiguous")
def _contiguous(a: Args, ctx: RuleContext) -> str | None:
    return strided(a, _TENSORS)


@rule("slot_range")
def _slot_range(a: Args, ctx: RuleContext) -> str | None:
    end = a.key_cache.shape[0] * a.block_size
    return slot_beyond("slot_mapping", a.slot_mapping, end)


@rule("slot_unique")
def _slot_unique(a: Args, ctx: RuleContext) -> str | None:
    return slot_written_twice(a.slot_mapping)
