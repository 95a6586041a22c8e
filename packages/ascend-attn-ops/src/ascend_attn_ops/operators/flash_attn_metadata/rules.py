"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...contract import Contract, Finding, RuleContext
from .._shared.flash_attn import bad_lengths, bad_prefix_sums, is_paged
from .arguments import FlashAttnMetadataArguments as Args
from .lengths import kv_lengths, query_lengths

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")


@rule("layout_q")
def _layout_q(a: Args, ctx: RuleContext) -> str | None:
    return None if a.layouts[0] in ctx.limits["query_layouts"] else repr(a.layout_q)


@rule("layout_kv")
def _layout_kv(a: Args, ctx: RuleContext) -> str | None:
    return None if a.layouts[1] in ctx.limits["kv_layouts"] else repr(a.layout_kv)


@rule("layout_out")
def _layout_out(a: Args, ctx: RuleContext) -> str | None:
    return None if a.layouts[2] in ctx.limits["query_layouts"] else repr(a.layout_out)


@rule("mask_mode")
def _mask_mode(a: Args, ctx: RuleContext) -> str | None:
    legal = a.mask_mode is None or a.mask_mode in ctx.limits["mask_modes"]
    return None if legal else str(a.mask_mode)


@rule("mask_mode_given")
def _mask_mode_given(a: Args, ctx: RuleContext) -> str | None:
    return "None, which CANN reads as 1" if a.mask_mode is None else None


@rule("windows")
def _windows(a: Args, ctx: RuleContext) -> str | None:
    return None if min(a.windows) >= -1 else str(list(a.windows))


@rule("max_seqlen")
def _max_seqlen(a: Args, ctx: RuleContext) -> str | None:
    return None if min(a.longest) >= -1 else str(list(a.longest))


@rule("heads")
def _heads(a: Args, ctx: RuleContext) -> str | None:
    legal = a.num_heads_q > 0 and a.num_heads_kv > 0 and a.num_heads_q % a.num_heads_kv == 0
    return None if legal else f"{a.num_heads_q} query heads, {a.num_heads_kv} key heads"


@rule("head_dim_positive")
def _head_dim_positive(a: Args, ctx: RuleContext) -> str | None:
    return None if a.head_dim > 0 else str(a.head_dim)


@rule("head_dim")
def _head_dim(a: Args, ctx: RuleContext) -> str | None:
    return None if a.head_dim in ctx.limits["head_sizes"] else str(a.head_dim)


@rule("batch_size")
def _batch_size(a: Args, ctx: RuleContext) -> str | None:
    legal = a.batch_size in (None, -1) or 1 <= (a.batch_size or 0) <= ctx.limits["max_batch"]
    return None if legal else str(a.batch_size)


@rule("length_tensors")
def _length_tensors(a: Args, ctx: RuleContext) -> str | Finding | None:
    for name in _LENGTHS:
        tensor = getattr(a, name)
        wrong = bad_lengths(name, tensor)
        if wrong is None and tensor is not None and name.startswith("cu_") and tensor.shape[0] < 2:
            wrong = f"{name} with {tensor.shape[0]} elements"
        if wrong:
            return Finding(wrong, parameter=name)
    return None


@rule("batch_given")
def _batch_given(a: Args, ctx: RuleContext) -> str | None:
    return None if a.requests >= 0 else f"batch_size {a.batch_size} and no query length tensor"


@rule("windows_unused")
def _windows_unused(a: Args, ctx: RuleContext) -> str | None:
    if a.mask_mode == 4 or a.windows == (-1, -1):
        return None
    return f"{list(a.windows)} in mask mode {a.mask_mode or 0}"


@rule("prefix_sums_given")
def _prefix_sums_given(a: Args, ctx: RuleContext) -> str | Finding | None:
    sides = zip(("q", "kv"), a.layouts, (a.cu_seqlens_q, a.cu_seqlens_kv), strict=False)
    for side, layout, sums in sides:
        if (layout == "TND") != (sums is not None):
            found = "nothing" if sums is None else "prefix sums"
            return Finding(f"{found} with {layout}", parameter=f"cu_seqlens_{side}")
    return None


@rule("lengths_known")
def _lengths_known(a: Args, ctx: RuleContext) -> str | Finding | None:
    used = (a.seqused_q, a.seqused_kv)
    for side, layout, lengths, longest in zip(
        ("q", "kv"), a.layouts, used, a.longest, strict=False
    ):
        if layout != "TND" and lengths is None and longest <= 0 and not is_paged(layout):
            return Finding(f"max_seqlen_{side} {longest} and no seqused_{side} with {layout}")
    return None


@rule("paged_lengths")
def _paged_lengths(a: Args, ctx: RuleContext) -> str | None:
    return (
        f"nothing with {a.layouts[1]}" if is_paged(a.layouts[1]) and a.seqused_kv is None else None
    )


@rule("layout_table")
def _layout_table(a: Args, ctx: RuleContext) -> str | None:
    query, kv, out = a.layouts
    legal = kv in ctx.limits["kv_of_query"][query] and out in ctx.limits["out_of_query"][query]
    return None if legal else f"query {query}, keys {kv}, output {out}"


@rule("batch_agrees")
def _batch_agrees(a: Args, ctx: RuleContext) -> str | Finding | None:
    requests = a.requests if a.batch_size in (None, -1) else a.batch_size
    for name in _LENGTHS:
        tensor: torch.Tensor | None = getattr(a, name)
        if tensor is None:
            continue
        count = tensor.shape[0] - name.startswith("cu_")
        if count != requests:
            return Finding(f"{count} requests in {name}, B = {requests}", parameter=name)
    return None


@rule("prefix_sum_values")
def _prefix_sum_values(a: Args, ctx: RuleContext) -> str | None:
    found = bad_prefix_sums("cu_seqlens_q", a.cu_seqlens_q, None)
    return found or bad_prefix_sums("cu_seqlens_kv", a.cu_seqlens_kv, None)


@rule("used_values")
def _used_values(a: Args, ctx: RuleContext) -> str | None:
    for name in ("seqused_q", "seqused_kv"):
        tensor: torch.Tensor | None = getattr(a, name)
        if tensor is not None and bool((tensor < 0).any()):
            index = int((tensor < 0).nonzero()[0])
            return f"{name}[{index}] = {int(tensor[index])}"
    return None


@rule("max_seqlen_values")
def _max_seqlen_values(a: Args, ctx: RuleContext) -> str | None:
    lengths = (query_lengths(a), kv_lengths(a))
    for side, longest, found in zip(("q", "kv"), a.longest, lengths, strict=True):
        largest = int(found.max(initial=0))
        if longest != -1 and largest > longest:
            return f"max_seqlen_{side} {longest}, longest {largest}"
    return None
