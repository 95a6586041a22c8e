"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

from ...contract import Contract, Finding, RuleContext
from .._shared.findings import given, unequal_dtypes, wrong_dtype, wrong_rank, wrong_shape
from .arguments import RotaryPositionEmbeddingArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
_ALL = ("input", "r1", "r2")


@rule("rotary_mode")
def _rotary_mode(a: Args, ctx: RuleContext) -> str | None:
    return None if a.rotary_mode in ctx.limits["modes"] else repr(a.rotary_mode)


@rule("rank")
def _rank(a: Args, ctx: RuleContext) -> Finding | None:
    if a.input.dim() not in (3, 4):
        return wrong_rank(a, ("input",), 3, 4)
    return wrong_rank(a, ("r1", "r2"), a.input.dim())


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("input",), ctx.limits["dtypes"])


@rule("rotate_rank")
def _rotate_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("rotate",), 2)


@rule("rotate_product")
def _rotate_product(a: Args, ctx: RuleContext) -> str | None:
    return None if a.rotate is None else str(list(a.rotate.shape))


@rule("head_size")
def _head_size(a: Args, ctx: RuleContext) -> str | None:
    return f"D {a.input.shape[-1]}" if a.input.shape[-1] % 2 else None


@rule("head_limit")
def _head_limit(a: Args, ctx: RuleContext) -> str | None:
    size = a.input.shape[-1]
    return None if size < ctx.limits["head_size_below"] else f"D {size}"


@rule("same_dtype")
def _same_dtype(a: Args, ctx: RuleContext) -> str | None:
    return unequal_dtypes(a, _ALL)


@rule("rotary_shape")
def _rotary_shape(a: Args, ctx: RuleContext) -> Finding | None:
    shape = a.input.shape
    for name, tensor in given(a, ("r1", "r2")).items():
        fits = all(size in (1, want) for size, want in zip(tensor.shape, shape, strict=True))
        if not fits or tensor.shape[-1] != shape[-1] or tensor.shape != a.r1.shape:
            return Finding(f"{list(tensor.shape)} for input {list(shape)}", parameter=name)
    return None


@rule("interleave_shape")
def _interleave_shape(a: Args, ctx: RuleContext) -> str | None:
    wide = [size for size in a.r1.shape[:-1] if size != 1]
    if a.rotary_mode == "half" or len(wide) <= 1:
        return None
    return str(list(a.r1.shape))


@rule("rotate_shape")
def _rotate_shape(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_shape(a, {"rotate": (a.input.shape[-1],) * 2})
