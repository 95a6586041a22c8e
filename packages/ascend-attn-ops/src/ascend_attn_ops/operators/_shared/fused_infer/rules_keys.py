"""Rules on keys and values: forms, paged caches, tensor lists, shapes, dtypes."""

from __future__ import annotations

import torch

from ....arguments import dtype_name
from ....contract import Finding, RuleContext
from .call import NZ_BYTES, Call, KeyShape
from .contracts import shared_rule


def _sides(c: Call) -> tuple[tuple[str, KeyShape], tuple[str, KeyShape]]:
    return ("key", c.k), ("value", c.v)


@shared_rule("kv_rank")
def _kv_rank(c: Call, ctx: RuleContext) -> Finding | None:
    ranks = (3, 4, 5) if c.paged else (len(c.base),)
    for name, tensors in (("key", c.key), ("value", c.value)):
        for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tensors:
            if tensor.dim() not in ranks:
                form = "paged caches" if c.paged else c.base
                allowed = f"rank {' or '.join(map(str, ranks))} for {form}"
                return Finding(f"rank {tensor.dim()} {list(tensor.shape)}", allowed, name)
    if isinstance(c.key, tuple) and not c.key:
        return Finding("an empty list", "one tensor per request", "key")
    return None


@shared_rule("kv_pairing")
def _kv_pairing(c: Call, ctx: RuleContext) -> str | None:
    key, value = (len(t) if isinstance(t, tuple) else None for t in (c.key, c.value))
    if key == value:
        return None
    shown = ("one tensor" if n is None else f"a list of {n}" for n in (key, value))
    return "key is {}, value is {}".format(*shown)


@shared_rule("kv_dtype")
def _kv_dtype(c: Call, ctx: RuleContext) -> str | None:
    key, value = c.first_key.dtype, c.first_value.dtype
    legal = {c.query.dtype, *(torch.int8, torch.int32)}
    if key == value and key in legal:
        return None
    names = (dtype_name(dtype) for dtype in (c.query.dtype, key, value))
    return "query {}, key {}, value {}".format(*names)


@shared_rule("tensor_list")
def _tensor_list(c: Call, ctx: RuleContext) -> str | None:
    if isinstance(c.key, torch.Tensor):
        return None
    if c.layout not in ctx.limits["list_layouts"]:
        return f"a list in layout {c.layout}"
    for name, given in (("block_table", c.paged), ("query_rope", c.rope), ("prefix", c.prefixed)):
        if given:
            return f"a list together with {name}"
    return None


@shared_rule("tensor_list_shapes")
def _tensor_list_shapes(c: Call, ctx: RuleContext) -> str | None:
    if not isinstance(c.key, tuple) or not isinstance(c.value, tuple):
        return None
    if len(c.key) != c.q.batch:
        return f"{len(c.key)} tensors for {c.q.batch} requests"
    for index, (key, value) in enumerate(zip(c.key, c.value, strict=True)):
        k, v = c.key_shape(key), c.key_shape(value)
        if k.batch != 1 or v.batch != 1 or k.length != v.length:
            return f"key {list(key.shape)}, value {list(value.shape)} at position {index}"
        if (k.heads, k.size, v.heads, v.size) != (c.kv_heads, c.q.size, c.v.heads, c.v.size):
            return f"key {list(key.shape)}, value {list(value.shape)} at position {index}"
    return None


@shared_rule("block_table")
def _block_table(c: Call, ctx: RuleContext) -> str | None:
    table = c.block_table
    if table is None:
        return None
    if table.dim() == 2 and table.shape[0] == c.q.batch and table.shape[1] > 0:
        return None if table.dtype == torch.int32 else dtype_name(table.dtype)
    return f"{list(table.shape)} for {c.q.batch} requests"


@shared_rule("block_size")
def _block_size(c: Call, ctx: RuleContext) -> Finding | None:
    if not c.paged:
        return None
    for name, side in _sides(c):
        if side.length != c.block_size:
            return Finding(f"{c.block_size} for a {name} of blocks of {side.length}")
    return Finding("0") if c.block_size <= 0 else None


@shared_rule("block_size_limits")
def _block_size_limits(c: Call, ctx: RuleContext) -> Finding | None:
    if not c.paged:
        return None
    kind = _block_kind(c, ctx)
    multiple, most = ctx.limits[f"block_multiple_{kind}"], ctx.limits[f"block_max_{kind}"]
    if 0 < c.block_size <= most and c.block_size % multiple == 0:
        return None
    return Finding(str(c.block_size), f"a multiple of {multiple}, at most {most}")


def _block_kind(c: Call, ctx: RuleContext) -> str:
    if ctx.family not in ctx.limits["classic_families"] or c.packed or c.rope:
        return "general"
    if not c.single:
        return "prompt"
    return "decode_int8" if c.int8_keys else "decode"


@shared_rule("cache_form")
def _cache_form(c: Call, ctx: RuleContext) -> str | None:
    wide = c.base in ("BSH", "BSND")
    if not c.paged or c.k.form != "BnNBsD" or not wide:
        return None
    return f"a BnNBsD cache {list(c.first_key.shape)} with layout {c.layout}"


@shared_rule("flat_width")
def _flat_width(c: Call, ctx: RuleContext) -> str | None:
    width = c.first_key.shape[-1]
    if not c.paged or c.k.form != "BnBsH" or width <= ctx.limits["max_flat_width"]:
        return None
    return f"KN*D = {width}"


@shared_rule("nz_inner")
def _nz_inner(c: Call, ctx: RuleContext) -> Finding | None:
    if not c.paged:
        return None
    for name, tensor in (("key", c.first_key), ("value", c.first_value)):
        inner = NZ_BYTES // tensor.element_size()
        if tensor.dim() == 5 and tensor.shape[4] != inner:
            return Finding(str(list(tensor.shape)), f"last dimension {inner}", name)
    return None


@shared_rule("nz_head_size")
def _nz_head_size(c: Call, ctx: RuleContext) -> str | None:
    if not c.paged or c.rope or c.k.form != "NZ" or c.q.size in ctx.limits["nz_head_sizes"]:
        return None
    return str(c.q.size)


@shared_rule("kv_shape")
def _kv_shape(c: Call, ctx: RuleContext) -> Finding | None:
    if c.no_keys or not isinstance(c.key, torch.Tensor) or not isinstance(c.value, torch.Tensor):
        return None
    batch = c.k.batch if c.paged or c.packed else c.q.batch
    want = (c.k.form, batch, c.k.length, c.kv_heads)
    for name, side in _sides(c):
        size = c.q.size if name == "key" else side.size
        found = (side.form, side.batch, side.length, side.heads, side.size)
        if found != (*want, size) or size is None:
            return Finding(_named(*found), _named(*want, size), name)
    return None


def _named(form: str, batch: int, length: int, heads: int, size: int | None) -> str:
    first, second = ("blocks", "block size") if form != "rows" else ("batch", "length")
    width = "a width that KN divides" if size is None else f"D {size}"
    return f"{form}: {first} {batch}, {second} {length}, KN {heads}, {width}"
