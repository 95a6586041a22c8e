"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.findings import wrong_dtype
from .._shared.indexer_rules import add_indexer_rules
from .._shared.sequence_rules import add_sequence_rules, strided
from .arguments import LightningIndexerArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
add_sequence_rules(CONTRACT)
add_indexer_rules(CONTRACT)


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("query",), ctx.limits["host_dtypes"])


@rule("half")
def _half(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("query",), ctx.limits["half_dtypes"])


@rule("sparse_count")
def _sparse_count(a: Args, ctx: RuleContext) -> str | None:
    count = a.sparse_count
    legal = 1 <= count <= ctx.limits["count_max"]
    legal = legal or (count > 0 and count % ctx.limits["count_multiple"] == 0)
    return None if legal else str(count)


@rule("weights_dtype")
def _weights_dtype(a: Args, ctx: RuleContext) -> str | None:
    if a.weights.dtype in (a.query.dtype, torch.float32):
        return None
    return f"{dtype_name(a.weights.dtype)} for a query of {dtype_name(a.query.dtype)}"


@rule("weights_dtype_a5")
def _weights_dtype_a5(a: Args, ctx: RuleContext) -> str | None:
    if a.weights.dtype == a.query.dtype:
        return None
    return f"{dtype_name(a.weights.dtype)} for a query of {dtype_name(a.query.dtype)}"


@rule("values_of_paged_keys")
def _values_of_paged_keys(a: Args, ctx: RuleContext) -> str | None:
    return "True with PA_BSND" if a.return_value and a.sequences.paged else None


@rule("cache_strides")
def _cache_strides(a: Args, ctx: RuleContext) -> str | None:
    free = ctx.family in ctx.limits["strided_families"]
    return strided({"key": a.key}, a.layout_key, free_axis=free)
