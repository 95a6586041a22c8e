"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .arguments import FusedInferAttentionScoreArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule


@rule("layout")
def _layout(a: Args, ctx: RuleContext) -> str | None:
    return None if a.input_layout in ctx.limits["layouts"] else repr(a.input_layout)


@rule("query_rank")
def _query_rank(a: Args, ctx: RuleContext) -> str | None:
    return None if a.query.dim() == 3 else f"rank {a.query.dim()} ({list(a.query.shape)})"


@rule("heads")
def _heads(a: Args, ctx: RuleContext) -> str | None:
    if not 1 <= a.num_heads <= ctx.limits["max_heads"]:
        return str(a.num_heads)
    if a.query.dim() == 3 and a.query.shape[1] != a.num_heads:
        return f"{a.num_heads} for query {list(a.query.shape)}"
    return None


@rule("kv_heads")
def _kv_heads(a: Args, ctx: RuleContext) -> str | None:
    heads = a.num_key_value_heads
    bad = heads < 0 or (heads and a.num_heads % heads)
    if bad or a.num_heads // max(a.kv_heads, 1) > ctx.limits["max_group"]:
        return f"{heads} for {a.num_heads} query heads"
    return None


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> str | None:
    name = dtype_name(a.query.dtype)
    return None if name in ctx.limits["host_dtypes"] else name


@rule("half")
def _half(a: Args, ctx: RuleContext) -> str | None:
    name = dtype_name(a.query.dtype)
    return None if name in ctx.limits["half_dtypes"] else name


@rule("sparse_mode")
def _sparse_mode(a: Args, ctx: RuleContext) -> str | None:
    return None if a.sparse_mode in ctx.limits["sparse_modes"] else str(a.sparse_mode)


@rule("query_lengths_given")
def _query_lengths_given(a: Args, ctx: RuleContext) -> str | None:
    return None if a.actual_seq_lengths else "nothing"


@rule("kv_lengths_given")
def _kv_lengths_given(a: Args, ctx: RuleContext) -> str | None:
    return None if a.actual_seq_lengths_kv else "nothing"


@rule("mask_given")
def _mask_given(a: Args, ctx: RuleContext) -> str | None:
    mask, size = a.atten_mask, ctx.limits["template"]
    if a.sparse_mode == 0:
        return None if mask is None else f"a mask {list(mask.shape)} in mode 0"
    if mask is None:
        return f"nothing in mode {a.sparse_mode}"
    if tuple(mask.shape) not in ((size, size), (1, size, size), (1, 1, size, size)):
        return f"a mask {list(mask.shape)} in mode {a.sparse_mode}"
    name = dtype_name(mask.dtype)
    return None if name in ctx.limits["mask_dtypes"] else f"a mask of {name}"


@rule("kv_dtype")
def _kv_dtype(a: Args, ctx: RuleContext) -> str | None:
    if a.key.dtype == a.value.dtype == a.query.dtype:
        return None
    names = (dtype_name(t.dtype) for t in (a.query, a.key, a.value))
    return "query {}, key {}, value {}".format(*names)


@rule("batch_limit")
def _batch_limit(a: Args, ctx: RuleContext) -> str | None:
    count = len(a.actual_seq_lengths or ())
    return None if count <= ctx.limits["max_batch_tnd"] else str(count)


@rule("query_lengths")
def _query_lengths(a: Args, ctx: RuleContext) -> str | Finding | None:
    ends = a.actual_seq_lengths or ()
    start = 0
    for index, end in enumerate(ends):
        if end < start:
            return f"value {end} after {start} at position {index}"
        start = end
    return None if start == a.query.shape[0] else f"last {start}, T = {a.query.shape[0]}"


@rule("kv_lengths")
def _kv_lengths(a: Args, ctx: RuleContext) -> str | None:
    lengths, requests = a.actual_seq_lengths_kv or (), len(a.actual_seq_lengths or ())
    if len(lengths) != requests:
        return f"{len(lengths)} lengths for {requests} requests"
    if a.block_table is None:
        ordered = all(x <= y for x, y in zip((0, *lengths), lengths, strict=False))
        return None if ordered and lengths[-1] == a.key.shape[0] else f"{list(lengths[:8])} ..."
    room = a.block_table.shape[1] * a.block_size
    wrong = [(i, n) for i, n in enumerate(lengths) if not 0 <= n <= room]
    return f"length {wrong[0][1]} of request {wrong[0][0]}, room {room}" if wrong else None


@rule("block_table")
def _block_table(a: Args, ctx: RuleContext) -> str | None:
    table = a.block_table
    if table is None:
        return None
    rows = len(a.actual_seq_lengths or ())
    if table.dim() == 2 and table.shape[0] == rows and table.shape[1] > 0:
        return None if table.dtype == torch.int32 else dtype_name(table.dtype)
    return f"{list(table.shape)} for {rows} requests"


def _cache_block_size(a: Args) -> int | None:
    """Block size that the cache's shape shows: BnBsH has it second, BnNBsD third."""
    if a.key.dim() == 3:
        return a.key.shape[1]
    return a.key.shape[2] if a.key.dim() == 4 else None


@rule("block_size")
def _block_size(a: Args, ctx: RuleContext) -> str | None:
    if not a.paged or a.block_size == _cache_block_size(a):
        return None
    return f"{a.block_size} for a cache {list(a.key.shape)}"


@rule("block_size_limits")
def _block_size_limits(a: Args, ctx: RuleContext) -> str | None:
    if not a.paged:
        return None
    legal = 0 < a.block_size <= ctx.limits["block_max"]
    return None if legal and a.block_size % ctx.limits["block_multiple"] == 0 else str(a.block_size)


@rule("kv_shape")
def _kv_shape(a: Args, ctx: RuleContext) -> Finding | None:
    heads, size = a.kv_heads, a.query.shape[2]
    for name, tensor in (("key", a.key), ("value", a.value)):
        shape = tuple(tensor.shape)
        if a.paged:
            blocks = a.key.shape[0]
            legal = [(blocks, a.block_size, heads * size), (blocks, heads, a.block_size, size)]
        else:
            legal = [(a.key.shape[0], heads, size)]
        if shape not in legal:
            choices = " or ".join(str(list(entry)) for entry in legal)
            return Finding(str(list(shape)), allowed=choices, parameter=name)
    return None


@rule("head_size")
def _head_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.query.shape[2]
    return None if size in ctx.limits["tnd_head_sizes"] else str(size)


@rule("block_ids")
def _block_ids(a: Args, ctx: RuleContext) -> str | None:
    if a.block_table is None:
        return None
    lengths = torch.tensor(a.actual_seq_lengths_kv, dtype=torch.long)
    used = torch.arange(a.block_table.shape[1]) * a.block_size < lengths[:, None]
    wrong = used & ((a.block_table < 0) | (a.block_table >= a.key.shape[0])).cpu()
    if not wrong.any():
        return None
    row, column = wrong.nonzero()[0].tolist()
    return f"block_table[{row}, {column}] = {int(a.block_table[row, column])} of {a.key.shape[0]}"


@rule("template_values")
def _template_values(a: Args, ctx: RuleContext) -> str | None:
    if a.atten_mask is None or a.sparse_mode == 0:
        return None
    mask = a.atten_mask.reshape(a.atten_mask.shape[-2:]).bool()
    wrong = (mask != torch.ones_like(mask).triu(1)).nonzero()
    return f"{int(mask[tuple(wrong[0])])} at {wrong[0].tolist()}" if wrong.numel() else None
