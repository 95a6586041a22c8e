"""Predicates of the value rules: what only the sanitizer looks at."""

from __future__ import annotations

import torch

from ...contract import RuleContext
from .._shared.flash_attn import bad_prefix_sums, bad_used_lengths
from ..flash_attn_metadata.reference import run_reference as make_plan
from ..flash_attn_metadata.rules import CONTRACT as PLAN_CONTRACT
from .arguments import FlashAttnArguments as Args
from .lengths import kv_side, query_side
from .rules import CONTRACT

rule = CONTRACT.rule
_HEAD_OF_DEVICE = (2, 3, 4, 5, 6)  # block sizes, core counts, output layout


@rule("prefix_sum_values")
def _prefix_sum_values(a: Args, ctx: RuleContext) -> str | None:
    tokens = a.k.shape[0] if a.layout_kv == "TND" else None
    return bad_prefix_sums("cu_seqlens_q", a.cu_seqlens_q, a.q.shape[0]) or bad_prefix_sums(
        "cu_seqlens_kv", a.cu_seqlens_kv, tokens
    )


@rule("used_values")
def _used_values(a: Args, ctx: RuleContext) -> str | None:
    query, kv = query_side(a).room.tolist(), kv_side(a).room.tolist()
    return bad_used_lengths("seqused_q", a.seqused_q, query) or bad_used_lengths(
        "seqused_kv", a.seqused_kv, kv
    )


@rule("max_seqlen_values")
def _max_seqlen_values(a: Args, ctx: RuleContext) -> str | None:
    sides = (("q", a.max_seqlen_q, query_side(a)), ("kv", a.max_seqlen_kv, kv_side(a)))
    for name, longest, side in sides:
        largest = int(side.length.max()) if side.length.numel() else 0
        if longest != -1 and largest > longest:
            return f"max_seqlen_{name} {longest}, longest {largest}"
    return None


@rule("block_ids")
def _block_ids(a: Args, ctx: RuleContext) -> str | None:
    if a.block_table is None:
        return None
    table, blocks = a.block_table.cpu(), a.k.shape[0]
    used = torch.arange(table.shape[1]) * a.block_size < kv_side(a).length[:, None]
    wrong = (used & ((table < 0) | (table >= blocks))).nonzero()
    if not wrong.numel():
        return None
    row, column = wrong[0].tolist()
    return f"block_table[{row}, {column}] = {int(table[row, column])} of {blocks} blocks"


@rule("template_values")
def _template_values(a: Args, ctx: RuleContext) -> str | None:
    if a.attn_mask is None:
        return None
    wrong = (a.attn_mask != torch.ones_like(a.attn_mask).triu(1)).nonzero()
    if not wrong.numel():
        return None
    row, column = wrong[0].tolist()
    return f"{int(a.attn_mask[row, column])} at [{row}, {column}]"


@rule("plan")
def _plan(a: Args, ctx: RuleContext) -> str | None:
    if a.metadata is None:
        return None
    wanted = a.plan_arguments()
    if PLAN_CONTRACT.broken_values(wanted, ctx.profile):
        return None  # the rules about lengths say why no plan can be made
    plan = make_plan(wanted).to(a.metadata.device)
    if plan.shape != a.metadata.shape:
        return f"{a.metadata.shape[0]} words, this call's plan has {plan.shape[0]}"
    wrong = (plan != a.metadata).nonzero().flatten().tolist()
    if a.metadata.device.type != "cpu":
        wrong = [word for word in wrong if word in _HEAD_OF_DEVICE]
    if not wrong:
        return None
    word = wrong[0]
    return f"word {word} is {int(a.metadata[word])}, this call's plan has {int(plan[word])}"
