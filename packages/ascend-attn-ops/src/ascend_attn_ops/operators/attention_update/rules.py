"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .arguments import AttentionUpdateArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
Tensors = tuple[torch.Tensor, ...]
Judge = Callable[[torch.Tensor], str | None]


def _first(
    name: str, tensors: Tensors, wrong: Callable[[torch.Tensor], str | None]
) -> Finding | None:
    """What is wrong with the first part that has something wrong."""
    for index, tensor in enumerate(tensors):
        found = wrong(tensor)
        if found:
            return Finding(found, parameter=f"{name}[{index}]")
    return None


def _rank_is(rank: int) -> Judge:
    return lambda t: None if t.dim() == rank else f"rank {t.dim()} {list(t.shape)}"


@rule("part_count")
def _part_count(a: Args, ctx: RuleContext) -> str | None:
    return None if 1 <= len(a.lse) <= ctx.limits["parts"] else f"{len(a.lse)} parts"


@rule("same_count")
def _same_count(a: Args, ctx: RuleContext) -> str | None:
    if len(a.lse) == len(a.local_out):
        return None
    return f"{len(a.lse)} lse, {len(a.local_out)} local_out"


@rule("update_type")
def _update_type(a: Args, ctx: RuleContext) -> str | None:
    return None if a.update_type in (0, 1) else str(a.update_type)


@rule("lse_dtype")
def _lse_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return _first("lse", a.lse, lambda t: None if t.dtype == torch.float32 else dtype_name(t.dtype))


@rule("lse_rank")
def _lse_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return _first("lse", a.lse, _rank_is(1))


@rule("out_dtype")
def _out_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    first = a.local_out[0].dtype

    def wrong(tensor: torch.Tensor) -> str | None:
        name = dtype_name(tensor.dtype)
        legal = name in ctx.limits["dtypes"] and tensor.dtype == first
        return None if legal else name

    return _first("local_out", a.local_out, wrong)


@rule("out_rank")
def _out_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return _first("local_out", a.local_out, _rank_is(2))


@rule("head_size")
def _head_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.local_out[0].shape[1]
    multiple = ctx.limits["head_multiple"]
    legal = multiple <= size <= ctx.limits["head_size"] and size % multiple == 0
    return None if legal else f"D {size}"


@rule("same_shape")
def _same_shape(a: Args, ctx: RuleContext) -> Finding | None:
    shape = a.local_out[0].shape

    def wrong(expected: torch.Size) -> Judge:
        return lambda t: None if t.shape == expected else f"{list(t.shape)}, not {list(expected)}"

    return _first("local_out", a.local_out, wrong(shape)) or _first("lse", a.lse, wrong(shape[:1]))


@rule("contiguous")
def _contiguous(a: Args, ctx: RuleContext) -> Finding | None:
    def wrong(tensor: torch.Tensor) -> str | None:
        return None if tensor.is_contiguous() else f"strides {tensor.stride()}"

    return _first("lse", a.lse, wrong) or _first("local_out", a.local_out, wrong)


@rule("all_parts_empty")
def _all_parts_empty(a: Args, ctx: RuleContext) -> str | None:
    rows = torch.stack(a.lse).isneginf().all(0).nonzero().flatten().tolist()
    return f"row {rows[0]} is -inf in all {len(a.lse)} parts" if rows else None


@rule("infinite_part")
def _infinite_part(a: Args, ctx: RuleContext) -> str | None:
    lse = torch.stack(a.lse)
    places = (lse.isposinf() | lse.isnan()).nonzero().tolist()
    if not places:
        return None
    part, row = places[0]
    return f"lse[{part}][{row}] = {float(lse[part, row])}"
