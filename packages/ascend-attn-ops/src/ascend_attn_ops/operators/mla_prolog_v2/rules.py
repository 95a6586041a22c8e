"""The contract of version 3 with the predicates that version 2 has of its own."""

from __future__ import annotations

from typing import Any

from ...contract import Contract, RuleContext
from ..mla_prolog_v3.rules import CONTRACT as VERSION_3
from .arguments import MlaPrologV2Arguments as Args

CONTRACT: Contract[Any] = VERSION_3.extended(
    __package__,
    without=frozenset(
        {"product_quant", "clip_given", "lengths_given", "hifloat8_named", "index_given"}
    ),
    seen_as=Args.as_v3,
)
rule = CONTRACT.rule


@rule("quant_combination")
def _quant_combination(a: Args, ctx: RuleContext) -> str | None:
    if a.kv_cache_quant_mode == 0 or a.weight_quant_mode:
        return None
    return "quant_scale_ckv without int8 weights"


@rule("block_size")
def _block_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.kv_cache.shape[1]
    return None if size in ctx.limits["block_sizes"] else str(size)


@rule("token_count")
def _token_count(a: Args, ctx: RuleContext) -> str | None:
    names = ("batch", "positions") if len(a.lead) == 2 else ("tokens",)
    legal = all(size <= ctx.limits[name] for size, name in zip(a.lead, names, strict=True))
    return None if legal else str(list(a.token_x.shape))
