"""Predicates of the rules in ``contract.toml`` that look at shapes, dtypes and scalars."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.findings import wrong_dtype
from .._shared.flash_attn import AXES, bad_lengths, size_of
from .arguments import FlashAttnArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule


@rule("layout_q")
def _layout_q(a: Args, ctx: RuleContext) -> str | None:
    return None if a.layout_q in ctx.limits["query_layouts"] else repr(a.layout_q)


@rule("layout_kv")
def _layout_kv(a: Args, ctx: RuleContext) -> str | None:
    return None if a.layout_kv in ctx.limits["kv_layouts"] else repr(a.layout_kv)


@rule("layout_out")
def _layout_out(a: Args, ctx: RuleContext) -> str | None:
    return None if a.layout_out in ctx.limits["query_layouts"] else repr(a.layout_out)


@rule("ranks")
def _ranks(a: Args, ctx: RuleContext) -> Finding | None:
    sides = (("q", a.q, a.layout_q), ("k", a.k, a.layout_kv), ("v", a.v, a.layout_kv))
    for name, tensor, layout in sides:
        if tensor.dim() != len(AXES[layout]):
            found = f"rank {tensor.dim()} ({list(tensor.shape)}) with {layout}"
            return Finding(found, parameter=name)
    return None


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("q",), ctx.limits["host_dtypes"])


@rule("half")
def _half(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("q",), ctx.limits["half_dtypes"])


@rule("mask_mode")
def _mask_mode(a: Args, ctx: RuleContext) -> str | None:
    return None if a.mask_mode in ctx.limits["mask_modes"] else str(a.mask_mode)


@rule("windows")
def _windows(a: Args, ctx: RuleContext) -> str | None:
    return None if min(a.win_left, a.win_right) >= -1 else f"{a.win_left}, {a.win_right}"


@rule("max_seqlen")
def _max_seqlen(a: Args, ctx: RuleContext) -> str | None:
    legal = min(a.max_seqlen_q, a.max_seqlen_kv) >= -1
    return None if legal else f"{a.max_seqlen_q}, {a.max_seqlen_kv}"


@rule("mask_tensor")
def _mask_tensor(a: Args, ctx: RuleContext) -> str | None:
    mask, size = a.attn_mask, ctx.limits["template"]
    if mask is None or (mask.dtype == torch.int8 and tuple(mask.shape) == (size, size)):
        return None
    return f"{dtype_name(mask.dtype)}{list(mask.shape)}"


@rule("length_tensors")
def _length_tensors(a: Args, ctx: RuleContext) -> Finding | None:
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv"):
        tensor: torch.Tensor | None = getattr(a, name)
        wrong = bad_lengths(name, tensor)
        if wrong is None and tensor is not None and name.startswith("cu_") and tensor.shape[0] < 2:
            wrong = f"{name} with {tensor.shape[0]} elements"
        if wrong:
            return Finding(wrong, parameter=name)
    return None


@rule("block_table")
def _block_table(a: Args, ctx: RuleContext) -> str | None:
    table = a.block_table
    if table is None or (table.dim() == 2 and table.dtype == torch.int32):
        return None
    return f"{dtype_name(table.dtype)}{list(table.shape)}"


@rule("metadata")
def _metadata(a: Args, ctx: RuleContext) -> str | None:
    plan = a.metadata
    if plan is None or (plan.dim() == 1 and plan.dtype == torch.int32 and plan.shape[0] > 0):
        return None
    return f"{dtype_name(plan.dtype)}{list(plan.shape)}"


@rule("sinks_supported")
def _sinks_supported(a: Args, ctx: RuleContext) -> str | None:
    return f"sinks {list(a.sinks.shape)}" if a.sinks is not None and a.has_sinks else None


@rule("metadata_given")
def _metadata_given(a: Args, ctx: RuleContext) -> str | None:
    return "nothing" if a.metadata is None else None


@rule("mask_given")
def _mask_given(a: Args, ctx: RuleContext) -> str | None:
    if (a.mask_mode == 0) == (a.attn_mask is None):
        return None
    return f"{'nothing' if a.attn_mask is None else 'a mask'} in mode {a.mask_mode}"


@rule("windows_unused")
def _windows_unused(a: Args, ctx: RuleContext) -> str | None:
    if a.mask_mode == 4 or (a.win_left, a.win_right) == (-1, -1):
        return None
    return f"{a.win_left}, {a.win_right} in mode {a.mask_mode}"


@rule("prefix_sums_given")
def _prefix_sums_given(a: Args, ctx: RuleContext) -> Finding | None:
    sides = (("q", a.layout_q, a.cu_seqlens_q), ("kv", a.layout_kv, a.cu_seqlens_kv))
    for side, layout, sums in sides:
        if (layout == "TND") != (sums is not None):
            found = "nothing" if sums is None else "prefix sums"
            return Finding(f"{found} with {layout}", parameter=f"cu_seqlens_{side}")
    return None


@rule("paged_arguments")
def _paged_arguments(a: Args, ctx: RuleContext) -> Finding | None:
    if a.paged != (a.block_table is not None):
        found = "nothing" if a.block_table is None else "a block table"
        return Finding(f"{found} with {a.layout_kv}", parameter="block_table")
    if a.paged and a.seqused_kv is None:
        return Finding(f"nothing with {a.layout_kv}", parameter="seqused_kv")
    return None


@rule("block_size")
def _block_size(a: Args, ctx: RuleContext) -> str | None:
    if not a.paged:
        return None
    size, limits = a.block_size, ctx.limits
    legal = limits["block_min"] <= size <= limits["block_max"]
    return None if legal and size % limits["block_multiple"] == 0 else f"block size {size}"


@rule("nz_inner")
def _nz_inner(a: Args, ctx: RuleContext) -> str | None:
    if a.layout_kv != "PA_NZ" or a.k.dim() != len(AXES["PA_NZ"]):
        return None
    return None if a.k.shape[-1] == ctx.limits["nz_inner"] else f"k {list(a.k.shape)}"


@rule("head_size")
def _head_size(a: Args, ctx: RuleContext) -> str | None:
    return None if a.head_dim in ctx.limits["head_sizes"] else str(a.head_dim)


@rule("not_empty")
def _not_empty(a: Args, ctx: RuleContext) -> Finding | None:
    for name, tensor in (("q", a.q), ("k", a.k), ("v", a.v)):
        if 0 in tensor.shape:
            return Finding(str(list(tensor.shape)), parameter=name)
    return None


@rule("batch_limit")
def _batch_limit(a: Args, ctx: RuleContext) -> str | None:
    return None if 1 <= a.requests <= ctx.limits["max_batch"] else f"{a.requests} requests"


@rule("kv_strides")
def _kv_strides(a: Args, ctx: RuleContext) -> Finding | None:
    free = ctx.limits["strided_axes"][a.layout_kv]
    for name, tensor in (("k", a.k), ("v", a.v)):
        expected = 1
        for axis in range(tensor.dim() - 1, free - 1, -1):
            size, stride = tensor.shape[axis], tensor.stride(axis)
            if size != 1 and stride != expected:
                found = f"{list(tensor.shape)} with strides {list(tensor.stride())}"
                return Finding(f"{found} in {a.layout_kv}", parameter=name)
            expected *= size
    return None


@rule("layout_table")
def _layout_table(a: Args, ctx: RuleContext) -> str | None:
    keys = ctx.limits["kv_of_query"][a.layout_q]
    legal = a.layout_kv in keys and a.layout_out in ctx.limits["out_of_query"][a.layout_q]
    return None if legal else f"q {a.layout_q}, kv {a.layout_kv}, out {a.layout_out}"


@rule("same_dtype")
def _same_dtype(a: Args, ctx: RuleContext) -> str | None:
    if a.k.dtype == a.v.dtype == a.q.dtype:
        return None
    names = (dtype_name(tensor.dtype) for tensor in (a.q, a.k, a.v))
    return "q {}, k {}, v {}".format(*names)


@rule("kv_shape")
def _kv_shape(a: Args, ctx: RuleContext) -> str | None:
    if a.k.shape == a.v.shape and size_of(a.k, a.layout_kv, "D") == a.head_dim:
        return None
    return f"q {list(a.q.shape)}, k {list(a.k.shape)}, v {list(a.v.shape)}"


@rule("heads")
def _heads(a: Args, ctx: RuleContext) -> str | None:
    legal = a.kv_heads > 0 and a.heads > 0 and a.heads % a.kv_heads == 0
    return None if legal else f"{a.heads} query heads, {a.kv_heads} key heads"


@rule("batch_agrees")
def _batch_agrees(a: Args, ctx: RuleContext) -> Finding | None:
    counts = {
        "k": None if a.paged or a.layout_kv == "TND" else a.k.shape[0],
        "block_table": None if a.block_table is None else a.block_table.shape[0],
        "cu_seqlens_kv": None if a.cu_seqlens_kv is None else a.cu_seqlens_kv.shape[0] - 1,
        "seqused_q": None if a.seqused_q is None else a.seqused_q.shape[0],
        "seqused_kv": None if a.seqused_kv is None else a.seqused_kv.shape[0],
    }
    for name, count in counts.items():
        if count is not None and count != a.requests:
            return Finding(f"{count} requests, q has {a.requests}", parameter=name)
    return None


@rule("sinks_shape")
def _sinks_shape(a: Args, ctx: RuleContext) -> str | None:
    if a.sinks is None or not a.has_sinks:
        return None
    legal = a.sinks.dtype == torch.float32 and tuple(a.sinks.shape) == (a.heads,)
    return None if legal else f"{dtype_name(a.sinks.dtype)}{list(a.sinks.shape)}"
