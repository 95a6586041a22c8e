"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.findings import wrong_dtype
from .._shared.indexer_rules import add_indexer_rules
from .._shared.sequence_rules import add_sequence_rules, shape_of, strided
from .arguments import QuantLightningIndexerArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
add_sequence_rules(CONTRACT)
add_indexer_rules(CONTRACT)


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("query",), ctx.limits["dtypes"])


@rule("scale_dtypes")
def _scale_dtypes(a: Args, ctx: RuleContext) -> str | None:
    named = (
        ("weights", a.weights, "weight_dtypes"),
        ("query_dequant_scale", a.query_dequant_scale, "scale_dtypes"),
        ("key_dequant_scale", a.key_dequant_scale, "scale_dtypes"),
    )
    names = [(name, dtype_name(tensor.dtype), limit) for name, tensor, limit in named]
    wrong = [f"{name} {dtype}" for name, dtype, limit in names if dtype not in ctx.limits[limit]]
    return ", ".join(wrong) or None


def _combination(a: Args) -> tuple[str, str]:
    kind = "hifloat8" if a.hifloat8 else dtype_name(a.query.dtype)
    tensors = (a.weights, a.query_dequant_scale, a.key_dequant_scale)
    return kind, ", ".join(dtype_name(tensor.dtype) for tensor in tensors)


def _wrong_combination(a: Args, legal: dict[str, list[str]]) -> Finding | None:
    kind, dtypes = _combination(a)
    if dtypes in legal.get(kind, ()):
        return None
    choices = "; ".join(f"{name}: {' or '.join(each)}" for name, each in legal.items())
    return Finding(f"{kind}: {dtypes}", allowed=choices)


@rule("combination_a2_a3")
def _combination_a2_a3(a: Args, ctx: RuleContext) -> Finding | None:
    return _wrong_combination(a, ctx.limits["combinations_a2_a3"])


@rule("combination_a5")
def _combination_a5(a: Args, ctx: RuleContext) -> Finding | None:
    return _wrong_combination(a, ctx.limits["combinations_a5"])


@rule("quant_modes")
def _quant_modes(a: Args, ctx: RuleContext) -> str | None:
    modes = {"query_quant_mode": a.query_quant_mode, "key_quant_mode": a.key_quant_mode}
    wrong = [f"{n} {v}" for n, v in modes.items() if v != ctx.limits["quant_mode"]]
    return ", ".join(wrong) or None


@rule("sparse_count")
def _sparse_count(a: Args, ctx: RuleContext) -> str | None:
    return None if 1 <= a.sparse_count <= ctx.limits["count_max"] else str(a.sparse_count)


@rule("scale_shapes")
def _scale_shapes(a: Args, ctx: RuleContext) -> Finding | None:
    pairs = (("query", a.query_dequant_scale, a.query), ("key", a.key_dequant_scale, a.key))
    for name, scale, quantised in pairs:
        expected = quantised.shape[:-1]
        if scale.shape != expected:
            parameter = f"{name}_dequant_scale"
            return Finding(shape_of(scale), allowed=str(list(expected)), parameter=parameter)
    return None


@rule("cache_strides")
def _cache_strides(a: Args, ctx: RuleContext) -> str | None:
    free = ctx.family in ctx.limits["strided_families"]
    caches = {"key": a.key, "key_dequant_scale": a.key_dequant_scale}
    return strided(caches, a.layout_key, free_axis=free)
