"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

from ...contract import Contract, Finding, RuleContext
from .._shared.findings import (
    given,
    strided,
    unequal_dtypes,
    wrong_dtype,
    wrong_rank,
    wrong_shape,
)
from .arguments import InterleaveRopeArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
_ALL = ("x", "cos", "sin")


@rule("rank")
def _rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, _ALL, 4)


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("x",), ctx.limits["float_dtypes"])


@rule("half")
def _half(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("x",), ctx.limits["half_dtypes"])


@rule("head_size")
def _head_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.x.shape[3]
    return None if size == ctx.limits["head_size"] else f"D {size}"


@rule("same_dtype")
def _same_dtype(a: Args, ctx: RuleContext) -> str | None:
    return unequal_dtypes(a, _ALL)


@rule("rotary_shape")
def _rotary_shape(a: Args, ctx: RuleContext) -> Finding | None:
    batch, _, tokens, size = a.x.shape
    shapes = {name: tuple(t.shape) for name, t in given(a, ("cos", "sin")).items()}
    if shapes["cos"] == shapes["sin"] == (batch, 1, 1, size):
        return None
    return wrong_shape(a, dict.fromkeys(shapes, (batch, 1, tokens, size)))


@rule("contiguous")
def _contiguous(a: Args, ctx: RuleContext) -> str | None:
    return strided(a, _ALL)
