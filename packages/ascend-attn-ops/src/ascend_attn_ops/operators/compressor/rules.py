"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...contract import Contract, Finding, RuleContext
from .._shared.findings import given, wrong_dtype, wrong_rank, wrong_shape
from .._shared.flash_attn import bad_prefix_sums, bad_used_lengths
from .arguments import CompressorArguments as Args
from .reference import Chunk, chunks, first_kept, output_shape

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule

_STATES = ("kv_state", "score_state")
_TABLES = ("kv_block_table", "score_block_table")
_ROPES = ("rope_sin", "rope_cos")
_VECTORS = ("cu_seqlens", "seqused", "start_pos")


@rule("ranks")
def _ranks(a: Args, ctx: RuleContext) -> Finding | None:
    return (
        wrong_rank(a, ("x",), 2, 3)
        or wrong_rank(a, ("wkv", "wgate", "ape"), 2)
        or wrong_rank(a, _STATES, 3)
        or wrong_rank(a, ("norm_weight",), 1)
        or wrong_rank(a, _ROPES, a.x.dim())
        or wrong_rank(a, _TABLES, 2)
        or wrong_rank(a, _VECTORS, 1)
    )


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("x",), ctx.limits["host_dtypes"])


@rule("half")
def _half(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("x",), ctx.limits["half_dtypes"])


@rule("cmp_ratio_positive")
def _cmp_ratio_positive(a: Args, ctx: RuleContext) -> str | None:
    return None if a.cmp_ratio > 0 else str(a.cmp_ratio)


@rule("cmp_ratio")
def _cmp_ratio(a: Args, ctx: RuleContext) -> str | None:
    return None if a.cmp_ratio in ctx.limits["ratios"] else str(a.cmp_ratio)


@rule("coff")
def _coff(a: Args, ctx: RuleContext) -> str | None:
    return None if a.coff in (1, 2) else str(a.coff)


@rule("rotary_mode")
def _rotary_mode(a: Args, ctx: RuleContext) -> str | None:
    return None if a.rotary_mode in (1, 2) else str(a.rotary_mode)


@rule("rotary_mode_interleaved")
def _rotary_mode_interleaved(a: Args, ctx: RuleContext) -> str | None:
    return "1 (half)" if a.rotary_mode == 1 else None


@rule("enabled_grad")
def _enabled_grad(a: Args, ctx: RuleContext) -> str | None:
    return "true" if a.enabled_grad else None


@rule("cu_seqlens_given")
def _cu_seqlens_given(a: Args, ctx: RuleContext) -> str | None:
    if a.batched != (a.cu_seqlens is not None):
        return None
    return f"{'prefix sums' if a.batched else 'nothing'} for x {list(a.x.shape)}"


@rule("block_tables_given")
def _block_tables_given(a: Args, ctx: RuleContext) -> str | None:
    missing = [name for name in _TABLES if getattr(a, name) is None]
    return f"no {' and no '.join(missing)}" if missing else None


@rule("hidden_size")
def _hidden_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.x.shape[-1]
    low, high = ctx.limits["hidden_range"]
    legal = low <= size <= high and size % ctx.limits["hidden_multiple"] == 0
    return None if legal else str(size)


@rule("combination")
def _combination(a: Args, ctx: RuleContext) -> str | None:
    found = [a.head_size, a.coff, a.cmp_ratio]
    if a.cmp_ratio not in ctx.limits["ratios"] or found in list(ctx.limits["combinations"]):
        return None
    return "D {}, coff {}, cmp_ratio {}".format(*found)


@rule("rope_head_dim")
def _rope_head_dim(a: Args, ctx: RuleContext) -> str | None:
    return None if a.rope_head_dim == ctx.limits["rope_size"] else str(a.rope_head_dim)


@rule("rope_fits")
def _rope_fits(a: Args, ctx: RuleContext) -> str | None:
    legal = 0 < a.rope_head_dim <= a.head_size and a.rope_head_dim % 2 == 0
    return None if legal else f"{a.rope_head_dim} of {a.head_size}"


@rule("block_size")
def _block_size(a: Args, ctx: RuleContext) -> Finding | None:
    for name, state in given(a, _STATES).items():
        size = state.shape[1]
        if not 1 <= size <= ctx.limits["block_max"] or size % ctx.limits["block_multiple"]:
            return Finding(str(size), parameter=name)
    return None


@rule("blocks")
def _blocks(a: Args, ctx: RuleContext) -> Finding | None:
    for name, state in given(a, _STATES).items():
        if 0 in state.shape:
            return Finding(str(list(state.shape)), parameter=name)
    return None


@rule("weight_dtype")
def _weight_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("wkv", "wgate"), [str(a.x.dtype).removeprefix("torch.")])


@rule("norm_dtype")
def _norm_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("norm_weight",), [str(a.x.dtype).removeprefix("torch.")])


@rule("rope_dtype")
def _rope_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, _ROPES, [str(a.x.dtype).removeprefix("torch."), "float32"])


@rule("state_dtype")
def _state_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, (*_STATES, "ape"), ["float32"])


@rule("int32")
def _int32(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, (*_TABLES, *_VECTORS), ["int32"])


@rule("shapes")
def _shapes(a: Args, ctx: RuleContext) -> Finding | None:
    width, hidden = a.coff * a.head_size, a.x.shape[-1]
    rope = (*output_shape(a)[:-1], a.rope_head_dim)
    expected: dict[str, tuple[int, ...]] = {
        "wkv": (width, hidden),
        "wgate": (width, hidden),
        "ape": (a.cmp_ratio, width),
        "rope_sin": rope,
        "rope_cos": rope,
        "seqused": (a.batch,),
        "start_pos": (a.batch,),
    }
    for name, tensor in given(a, _STATES).items():
        expected[name] = (tensor.shape[0], tensor.shape[1], width)
    for name, tensor in given(a, _TABLES).items():
        expected[name] = (a.batch, max(tensor.shape[1], 1))
    return wrong_shape(a, expected)


@rule("requests")
def _requests(a: Args, ctx: RuleContext) -> str | None:
    if a.cu_seqlens is None or a.cu_seqlens.numel() >= 1:
        return None
    return "0 elements"


@rule("prefix_sum_values")
def _prefix_sum_values(a: Args, ctx: RuleContext) -> str | None:
    wrong = bad_prefix_sums("cu_seqlens", a.cu_seqlens, None)
    if wrong is None and a.cu_seqlens is not None and int(a.cu_seqlens[-1]) > a.x.shape[0]:
        wrong = f"cu_seqlens[{a.batch}] = {int(a.cu_seqlens[-1])} of {a.x.shape[0]} tokens"
    return wrong


@rule("length_values")
def _length_values(a: Args, ctx: RuleContext) -> str | None:
    room = a.x.shape[1]
    rooms = room if a.cu_seqlens is None else [max(n, 0) for n in a.cu_seqlens.diff().tolist()]
    wrong = bad_used_lengths("seqused", a.seqused, rooms)
    return wrong or bad_used_lengths("start_pos", a.start_pos, 2**31 - 1)


@rule("block_ids")
def _block_ids(a: Args, ctx: RuleContext) -> Finding | None:
    for name, table_name in zip(_STATES, _TABLES, strict=True):
        state, table = getattr(a, name), getattr(a, table_name)
        for chunk in chunks(a):
            found = _bad_block(state, table[chunk.request], _touched(a, chunk))
            if found:
                return Finding(f"{table_name}[{chunk.request}, {found}", parameter=table_name)
    return None


def _touched(a: Args, chunk: Chunk) -> torch.Tensor:
    """Positions that are read or written for a request."""
    end = chunk.start + chunk.length
    first = chunk.start
    if chunk.groups(a.cmp_ratio) > 0:
        first = max(chunk.start // a.cmp_ratio - (a.coff - 1), 0) * a.cmp_ratio
    written = torch.arange(first_kept(a, chunk), max(end, first_kept(a, chunk)))
    return torch.cat([torch.arange(max(first, 0), max(chunk.start, first, 0)), written])


def _bad_block(state: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> str | None:
    """``column] = id`` for the first position without a block of the state."""
    for column in (position // state.shape[1]).unique().tolist():
        if column >= len(row):
            return f"{column}] is beyond the {len(row)} columns"
        if not 0 <= int(row[column]) < state.shape[0]:
            return f"{column}] = {int(row[column])} of {state.shape[0]} blocks"
    return None
