"""Predicates of the value rules: what only the sanitizer looks at."""

from __future__ import annotations

import torch

from ...contract import Finding, RuleContext
from .._shared.findings import first_element
from .._shared.flash_attn import bad_prefix_sums, bad_used_lengths
from .._shared.sequence_rules import bad_block_id
from ..sparse_flash_mla_metadata.reference import run_reference as make_plan
from ..sparse_flash_mla_metadata.rules import CONTRACT as PLAN_CONTRACT
from .arguments import PAGED
from .arguments import SparseFlashMlaArguments as Args
from .lengths import cmp_side, query_spans
from .reference import cmp_visible
from .rules import CONTRACT

rule = CONTRACT.rule
_SIDES = (
    ("seqused_q", "cu_seqlens_q", "q", "layout_q", ""),
    ("seqused_ori_kv", "cu_seqlens_ori_kv", "ori_kv", "layout_kv", "ori_block_table"),
    ("seqused_cmp_kv", "cu_seqlens_cmp_kv", "cmp_kv", "layout_kv", "cmp_block_table"),
)


@rule("prefix_sum_values")
def _prefix_sum_values(a: Args, ctx: RuleContext) -> str | None:
    for _, sums, rows, _, _ in _SIDES:
        ends: torch.Tensor | None = getattr(a, sums)
        if ends is None:
            continue
        wrong = bad_prefix_sums(sums, ends, None)
        room = getattr(a, rows).shape[0]
        if wrong is None and int(ends[-1]) > room:
            wrong = f"{sums}[{len(ends) - 1}] = {int(ends[-1])}, but there are {room} rows"
        if wrong:
            return wrong
    return None


@rule("used_values")
def _used_values(a: Args, ctx: RuleContext) -> str | None:
    for used, sums, rows, layout, table in _SIDES:
        if getattr(a, used) is None:
            continue
        room = _room(getattr(a, layout), getattr(a, rows), getattr(a, sums), a, table)
        wrong = bad_used_lengths(used, getattr(a, used), room)
        if wrong:
            return wrong
    return None


def _room(
    layout: str, rows: torch.Tensor, ends: torch.Tensor | None, a: Args, table: str
) -> list[int] | int:
    if layout == PAGED:
        columns: int = getattr(a, table).shape[1]
        return columns * rows.shape[1]
    if ends is not None:
        return [max(length, 0) for length in ends.diff().tolist()]
    return rows.shape[1]


@rule("residual_values")
def _residual_values(a: Args, ctx: RuleContext) -> str | None:
    residual = a.cmp_residual_kv
    if residual is None:
        return None
    return first_element("cmp_residual_kv", residual, (residual < 0) | (residual >= a.cmp_ratio))


@rule("block_ids")
def _block_ids(a: Args, ctx: RuleContext) -> Finding | None:
    for used, _, rows, _, name in _SIDES[1:]:
        table: torch.Tensor | None = getattr(a, name)
        if table is None:
            continue
        store: torch.Tensor = getattr(a, rows)
        wrong = bad_block_id(table, getattr(a, used), store.shape[0], store.shape[1])
        if wrong:
            return Finding(wrong, parameter=name)
    return None


@rule("indices_values")
def _indices_values(a: Args, ctx: RuleContext) -> str | None:
    if a.cmp_sparse_indices is None:
        return None
    entries = a.cmp_sparse_indices.flatten(0, -2)
    side = cmp_side(a)
    for request, (start, length) in enumerate(query_spans(a)):
        chosen = entries[start : start + max(length, 0)]
        rows = torch.arange(len(chosen))
        visible = cmp_visible(a, request, rows, length, side.length(request))[:, None]
        places = ((chosen < -1) | (chosen >= visible)).nonzero()
        if places.numel():
            row, column = places[0].tolist()
            found = f"row {start + row}, entry {column} = {int(chosen[row, column])}"
            return f"{found} of {int(visible[row])} visible keys"
    return None


@rule("plan")
def _plan(a: Args, ctx: RuleContext) -> str | None:
    if a.metadata is None:
        return None
    wanted = a.plan_arguments()
    if PLAN_CONTRACT.broken_values(wanted, ctx.profile):
        return None  # the rules about lengths say why no plan can be made
    plan = make_plan(wanted).to(a.metadata.device)
    wrong = (plan != a.metadata).nonzero()
    if not wrong.numel():
        return None
    word = int(wrong[0])
    return f"word {word} is {int(a.metadata[word])}, this call's plan has {int(plan[word])}"
