"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...contract import Contract, Finding, RuleContext
from .._shared.findings import first_element, strided, wrong_dtype, wrong_rank
from .arguments import RingAttentionUpdateArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
_OUTS = ("prev_attn_out", "cur_attn_out")
_SOFTMAX = ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")


@rule("layout")
def _layout(a: Args, ctx: RuleContext) -> str | None:
    return None if a.input_layout in ("SBH", "TND") else repr(a.input_layout)


@rule("softmax_layout")
def _softmax_layout(a: Args, ctx: RuleContext) -> str | None:
    name = a.input_softmax_layout
    return None if name in ("", "SBH", "TND") else repr(name)


@rule("out_rank")
def _out_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, _OUTS, 3)


@rule("out_dtype")
def _out_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, _OUTS, ctx.limits["dtypes"])


@rule("softmax_dtype")
def _softmax_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, _SOFTMAX, ("float32",))


@rule("softmax_rank")
def _softmax_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, _SOFTMAX, 4 if a.input_layout == "SBH" else 3)


@rule("lanes")
def _lanes(a: Args, ctx: RuleContext) -> Finding | None:
    for name, tensor in a.softmax.items():
        if tensor.dim() == 0 or tensor.shape[-1] != ctx.limits["lanes"]:
            return Finding(str(list(tensor.shape)), parameter=name)
    return None


@rule("query_lengths_dtype")
def _query_lengths_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("actual_seq_qlen",), ("int64",))


@rule("query_lengths_given")
def _query_lengths_given(a: Args, ctx: RuleContext) -> str | None:
    missing = a.input_layout == "TND" and a.actual_seq_qlen is None
    return "nothing (null)" if missing else None


@rule("same_out")
def _same_out(a: Args, ctx: RuleContext) -> str | None:
    prev, cur = a.prev_attn_out, a.cur_attn_out
    if (prev.shape, prev.dtype) == (cur.shape, cur.dtype):
        return None
    return f"{cur.dtype} {list(cur.shape)} after {prev.dtype} {list(prev.shape)}"


@rule("same_softmax")
def _same_softmax(a: Args, ctx: RuleContext) -> str | None:
    shapes = {name: tuple(tensor.shape) for name, tensor in a.softmax.items()}
    if len(set(shapes.values())) == 1:
        return None
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


@rule("softmax_rows")
def _softmax_rows(a: Args, ctx: RuleContext) -> Finding | None:
    first, second, last = a.prev_attn_out.shape
    if a.input_layout == "TND":
        if a.input_softmax_layout == "SBH":
            return None
        return _unlike(a, (first, second))
    heads = a.prev_softmax_max.shape[1]
    if heads == 0 or last % heads:
        return Finding(f"N {heads} for H {last}")
    return _unlike(a, (second, heads, first))


def _unlike(a: Args, rows: tuple[int, ...]) -> Finding | None:
    shape = tuple(a.prev_softmax_max.shape)
    return None if shape[:-1] == rows else Finding(str(list(shape)), str([*rows, 8]))


@rule("contiguous")
def _contiguous(a: Args, ctx: RuleContext) -> str | None:
    return strided(a, _OUTS + _SOFTMAX)


@rule("lanes_equal")
def _lanes_equal(a: Args, ctx: RuleContext) -> Finding | None:
    for name, tensor in a.softmax.items():
        found = first_element(name, tensor, tensor != tensor[..., :1])
        if found:
            return Finding(f"{found}, another value in lane 0", parameter=name)
    return None


@rule("sum_positive")
def _sum_positive(a: Args, ctx: RuleContext) -> str | None:
    both = (a.prev_softmax_sum <= 0) & (a.cur_softmax_sum <= 0)
    return first_element("prev_softmax_sum", a.prev_softmax_sum, both)


@rule("query_lengths")
def _query_lengths(a: Args, ctx: RuleContext) -> str | None:
    if a.input_layout != "TND" or a.actual_seq_qlen is None:
        return None
    ends = a.actual_seq_qlen
    total = a.prev_attn_out.shape[0]
    if not ends.numel() or int(ends[0]) != 0 or int(ends[-1]) != total:
        return f"{ends.tolist()} for {total} rows"
    falls = torch.zeros_like(ends, dtype=torch.bool)
    falls[1:] = ends.diff() < 0
    return first_element("actual_seq_qlen", ends, falls)
