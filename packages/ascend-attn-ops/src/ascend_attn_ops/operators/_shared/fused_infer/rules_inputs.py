"""Rules on the query, the scalars, the lengths and the outputs."""

from __future__ import annotations

import torch

from ....arguments import dtype_name
from ....contract import Finding, RuleContext
from .call import Call
from .contracts import shared_rule
from .outputs import output_metas


@shared_rule("layout")
def _layout(c: Call, ctx: RuleContext) -> str | None:
    return None if c.layout in ctx.limits["layouts"] else repr(c.layout)


@shared_rule("query_rank")
def _query_rank(c: Call, ctx: RuleContext) -> Finding | None:
    base = c.layout.partition("_")[0]
    if c.layout not in ctx.limits["layouts"] or c.query.dim() == len(base):
        return None
    allowed = f"rank {len(base)} ({', '.join(base)}) for {c.layout}"
    return Finding(f"rank {c.query.dim()} {list(c.query.shape)}", allowed)


@shared_rule("head_count")
def _head_count(c: Call, ctx: RuleContext) -> str | None:
    return None if c.heads >= 1 else str(c.heads)


@shared_rule("kv_head_count")
def _kv_head_count(c: Call, ctx: RuleContext) -> str | None:
    heads = c.kv_heads_given
    if heads < 0 or (heads and c.heads > 0 and c.heads % heads):
        return f"{heads} for {c.heads} query heads"
    return None


@shared_rule("heads")
def _heads(c: Call, ctx: RuleContext) -> str | None:
    wide = "H" in c.base
    matches = c.query.shape[-1] % c.heads == 0 if wide else c.q.heads == c.heads
    return None if matches else f"{c.heads} for query {list(c.query.shape)} in {c.base}"


@shared_rule("head_limit")
def _head_limit(c: Call, ctx: RuleContext) -> str | None:
    return None if c.heads <= ctx.limits["max_heads"] else str(c.heads)


@shared_rule("group_limit")
def _group_limit(c: Call, ctx: RuleContext) -> Finding | None:
    limit = ctx.limits["max_group_mla" if c.rope else "max_group"]
    group = c.heads // c.kv_heads
    if group <= limit:
        return None
    return Finding(f"{group} query heads per key head", f"at most {limit}")


@shared_rule("dtype")
def _dtype(c: Call, ctx: RuleContext) -> str | None:
    name = dtype_name(c.query.dtype)
    return None if name in ctx.limits["query_dtypes"] else name


@shared_rule("half")
def _half(c: Call, ctx: RuleContext) -> str | None:
    name = dtype_name(c.query.dtype)
    return name if name in ctx.limits["host_only_dtypes"] else None


@shared_rule("contiguous")
def _contiguous(c: Call, ctx: RuleContext) -> str | None:
    return None if c.query.is_contiguous() else f"strides {tuple(c.query.stride())}"


@shared_rule("sparse_mode")
def _sparse_mode(c: Call, ctx: RuleContext) -> str | None:
    return None if c.mode in ctx.limits["sparse_modes"] else str(c.mode)


@shared_rule("inner_precise")
def _inner_precise(c: Call, ctx: RuleContext) -> str | None:
    return None if c.inner_precise in ctx.limits["inner_precise"] else str(c.inner_precise)


@shared_rule("packed_inner_precise")
def _packed_inner_precise(c: Call, ctx: RuleContext) -> str | None:
    allowed = (0, 1) if c.query.dtype == torch.float16 else (0,)
    if not c.packed or c.rope or c.inner_precise in allowed:
        return None
    return f"{c.inner_precise} for {dtype_name(c.query.dtype)}"


@shared_rule("query_lengths_given")
def _query_lengths_given(c: Call, ctx: RuleContext) -> str | None:
    return "nothing" if c.packed and not c.q_lens else None


@shared_rule("kv_lengths_given")
def _kv_lengths_given(c: Call, ctx: RuleContext) -> str | None:
    return "nothing" if (c.packed or c.paged) and not c.kv_lens else None


@shared_rule("batch_limit")
def _batch_limit(c: Call, ctx: RuleContext) -> Finding | None:
    limit = ctx.limits["max_batch_packed" if c.packed else "max_batch"]
    return None if c.q.batch <= limit else Finding(f"{c.q.batch} requests", f"at most {limit}")


@shared_rule("length_limit")
def _length_limit(c: Call, ctx: RuleContext) -> Finding | None:
    if not c.packed and c.q.length > ctx.limits["max_query_length"]:
        return Finding(f"S {c.q.length}", f"at most {ctx.limits['max_query_length']}", "query")
    limit = ctx.limits["max_keys_single_query"]
    if c.single and c.k.length > limit and not c.paged:
        return Finding(f"KS {c.k.length}", f"at most {limit} with Q_S = 1", "key")
    return None


@shared_rule("query_lengths")
def _query_lengths(c: Call, ctx: RuleContext) -> str | None:
    if c.packed:
        return wrong_prefix_sums(c.q_lens or (), c.q.length, "T")
    return _wrong_lengths(c, c.q_lens, c.q.length)


@shared_rule("kv_lengths")
def _kv_lengths(c: Call, ctx: RuleContext) -> str | None:
    lengths = c.kv_lens or ()
    if c.packed and len(lengths) != c.q.batch:
        return f"{len(lengths)} lengths for {c.q.batch} requests"
    if c.packed and not c.paged:
        return wrong_prefix_sums(lengths, c.k.length, "KT")
    if c.prefixed or not (isinstance(c.key, torch.Tensor) or c.paged):
        return None if all(n >= 0 for n in lengths) else f"{list(lengths[:8])}"
    return _wrong_lengths(c, c.kv_lens, c.capacity)


def wrong_prefix_sums(ends: tuple[int, ...], total: int, name: str) -> str | None:
    """What is wrong with cumulative lengths that must end at ``total``."""
    start = 0
    for index, end in enumerate(ends):
        if end < start:
            return f"value {end} after {start} at position {index}"
        start = end
    return None if start == total else f"last {start}, {name} = {total}"


def _wrong_lengths(c: Call, lengths: tuple[int, ...] | None, room: int) -> str | None:
    if not lengths:
        return None
    if len(lengths) != 1 and len(lengths) < c.q.batch:
        return f"{len(lengths)} lengths for {c.q.batch} requests"
    for index, length in enumerate(lengths):
        if not 0 <= length <= room:
            return f"length {length} of request {index}, room {room}"
    return None


@shared_rule("outputs")
def _outputs(c: Call, ctx: RuleContext) -> Finding | None:
    expected = output_metas(c)
    names = ("attention_out", "softmax_lse")
    for name, meta, given in zip(names, expected, c.out or (), strict=False):
        unused = name == "softmax_lse" and not c.lse
        if unused or (tuple(given.shape), given.dtype) == (meta.shape, meta.dtype):
            continue
        allowed = f"{dtype_name(meta.dtype)}{list(meta.shape)}"
        return Finding(f"{dtype_name(given.dtype)}{list(given.shape)}", allowed, name)
    return None
