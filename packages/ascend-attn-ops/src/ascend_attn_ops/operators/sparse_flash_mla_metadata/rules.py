"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.findings import first_element, given
from .._shared.flash_attn import bad_lengths, bad_prefix_sums
from .._shared.shared_kv_rules import add_shared_kv_rules, wrong_counts, wrong_prefix_sums_given
from .arguments import SparseFlashMlaMetadataArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
add_shared_kv_rules(CONTRACT)

_SUMS = ("cu_seqlens_q", "cu_seqlens_ori_kv", "cu_seqlens_cmp_kv")
_USED = ("seqused_q", "seqused_ori_kv", "seqused_cmp_kv")


@rule("heads")
def _heads(a: Args, ctx: RuleContext) -> str | None:
    return None if 1 <= a.num_heads_q <= ctx.limits["max_heads"] else str(a.num_heads_q)


@rule("kv_heads")
def _kv_heads(a: Args, ctx: RuleContext) -> str | None:
    return None if a.num_heads_kv == 1 else str(a.num_heads_kv)


@rule("heads_a2_a3")
def _heads_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    return None if a.num_heads_q.bit_count() == 1 else str(a.num_heads_q)


@rule("head_size")
def _head_size(a: Args, ctx: RuleContext) -> str | None:
    return None if a.head_dim == ctx.limits["head_size"] else str(a.head_dim)


@rule("has_ori_kv")
def _has_ori_kv(a: Args, ctx: RuleContext) -> str | None:
    return None if a.has_ori_kv else "false"


@rule("ori_topk")
def _ori_topk(a: Args, ctx: RuleContext) -> str | None:
    if a.ori_topk_length is not None:
        return "ori_topk_length"
    return str(a.ori_topk) if a.ori_topk else None


@rule("cmp_topk")
def _cmp_topk(a: Args, ctx: RuleContext) -> str | None:
    return None if a.cmp_topk >= 0 else str(a.cmp_topk)


@rule("topk_a2_a3")
def _topk_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    return None if a.cmp_topk in (0, *ctx.limits["topk_a2_a3"]) else str(a.cmp_topk)


@rule("max_seqlen")
def _max_seqlen(a: Args, ctx: RuleContext) -> str | Finding | None:
    for name in ("max_seqlen_q", "max_seqlen_ori_kv", "max_seqlen_cmp_kv", "batch_size"):
        value: int = getattr(a, name)
        if value < 0:
            return Finding(str(value), parameter=name)
    return None


@rule("length_tensors")
def _length_tensors(a: Args, ctx: RuleContext) -> str | Finding | None:
    for name, tensor in given(a, (*_SUMS, *_USED, "cmp_residual_kv")).items():
        wrong = bad_lengths(name, tensor)
        if wrong is None and name in _SUMS and tensor.numel() < 2:
            wrong = f"{name} with {tensor.numel()} elements"
        if wrong:
            return Finding(wrong, parameter=name)
    return None


@rule("cu_seqlens")
def _cu_seqlens(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_prefix_sums_given(a)


@rule("seqused_given")
def _seqused_given(a: Args, ctx: RuleContext) -> str | None:
    if a.layout_kv != "PA_BBND":
        return None
    missing = [] if a.seqused_ori_kv is not None else ["seqused_ori_kv"]
    if a.has_cmp_kv and a.seqused_cmp_kv is None:
        missing.append("seqused_cmp_kv")
    return f"no {' and no '.join(missing)}" if missing else None


@rule("max_seqlen_q")
def _max_seqlen_q(a: Args, ctx: RuleContext) -> str | None:
    needed = a.layout_q == "TND" or a.seqused_q is None
    return "0" if needed and a.max_seqlen_q == 0 else None


@rule("batch_given")
def _batch_given(a: Args, ctx: RuleContext) -> str | None:
    return None if a.batch > 0 else f"batch_size {a.batch_size}"


@rule("alone")
def _alone(a: Args, ctx: RuleContext) -> str | None:
    if a.has_cmp_kv:
        return None
    wrong = {
        "cmp_ratio": a.cmp_ratio != 1,
        "cmp_mask_mode": a.cmp_mask_mode != 0,
        "cmp_topk": a.cmp_topk != 0,
    }
    found = [f"{name} {getattr(a, name)}" for name, bad in wrong.items() if bad]
    return ", ".join(found) or None


@rule("batch_agrees")
def _batch_agrees(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_counts(a, a.batch)


@rule("topk_length_form")
def _topk_length_form(a: Args, ctx: RuleContext) -> str | None:
    lengths = a.cmp_topk_length
    if lengths is None:
        return None
    rank = 2 if a.layout_q == "TND" else 3
    if lengths.dtype == torch.int32 and lengths.dim() == rank and lengths.shape[-1] == 1:
        return None
    return f"{dtype_name(lengths.dtype)}{list(lengths.shape)}"


@rule("prefix_sum_values")
def _prefix_sum_values(a: Args, ctx: RuleContext) -> str | None:
    found = (bad_prefix_sums(name, sums, None) for name, sums in given(a, _SUMS).items())
    return next(filter(None, found), None)


@rule("used_values")
def _used_values(a: Args, ctx: RuleContext) -> str | None:
    tensors = given(a, (*_USED, "cmp_topk_length"))
    found = (first_element(name, tensor, tensor < 0) for name, tensor in tensors.items())
    return next(filter(None, found), None)


@rule("residual_values")
def _residual_values(a: Args, ctx: RuleContext) -> str | None:
    residual = a.cmp_residual_kv
    if residual is None or not a.has_cmp_kv:
        return None
    outside = (residual < 0) | (residual >= a.cmp_ratio)
    return first_element("cmp_residual_kv", residual, outside)


@rule("topk_length_values")
def _topk_length_values(a: Args, ctx: RuleContext) -> str | None:
    if a.cmp_topk_length is None:
        return None
    count, rows = a.cmp_topk_length.numel(), a.batch * a.max_seqlen_q
    if a.layout_q == "TND" and a.cu_seqlens_q is not None:
        rows = int(a.cu_seqlens_q[-1])
    return None if count >= rows else f"{count} values for {rows} queries"
