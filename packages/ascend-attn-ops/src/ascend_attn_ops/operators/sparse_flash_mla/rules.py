"""Predicates of the rules in ``contract.toml`` that look at metadata only."""

from __future__ import annotations

import math

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.findings import given, wrong_dtype
from .._shared.sequence_rules import strided
from .._shared.shared_kv_rules import add_shared_kv_rules, wrong_counts, wrong_prefix_sums_given
from .arguments import PAGED
from .arguments import SparseFlashMlaArguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
add_shared_kv_rules(CONTRACT)

_KEYS = ("ori_kv", "cmp_kv")


@rule("ranks")
def _ranks(a: Args, ctx: RuleContext) -> Finding | None:
    for name, tensor in given(a, ("q", *_KEYS)).items():
        layout = a.layout_q if name == "q" else a.layout_kv
        if tensor.dim() != (3 if layout == "TND" else 4):
            return Finding(f"rank {tensor.dim()} for {layout}", parameter=name)
    return None


@rule("topk_value_mode")
def _topk_value_mode(a: Args, ctx: RuleContext) -> str | None:
    return None if a.topk_value_mode == 1 else str(a.topk_value_mode)


@rule("softmax_scale")
def _softmax_scale(a: Args, ctx: RuleContext) -> str | None:
    return None if math.isfinite(a.softmax_scale) else str(a.softmax_scale)


@rule("dtype")
def _dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("q",), ctx.limits["host_dtypes"])


@rule("half")
def _half(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("q",), ctx.limits["half_dtypes"])


@rule("ori_kv_given")
def _ori_kv_given(a: Args, ctx: RuleContext) -> str | None:
    return "nothing" if a.ori_kv is None else None


@rule("ori_indices")
def _ori_indices(a: Args, ctx: RuleContext) -> str | None:
    return ", ".join(given(a, ("ori_sparse_indices", "ori_topk_length"))) or None


@rule("indices_need_keys")
def _indices_need_keys(a: Args, ctx: RuleContext) -> str | None:
    return "indices without cmp_kv" if a.has_indices and not a.has_compressed else None


@rule("cu_seqlens")
def _cu_seqlens(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_prefix_sums_given(a)


@rule("block_tables")
def _block_tables(a: Args, ctx: RuleContext) -> Finding | None:
    paged = a.layout_kv == PAGED
    wanted = {"ori_block_table": paged, "cmp_block_table": paged and a.has_compressed}
    for name, expected in wanted.items():
        if expected != (getattr(a, name) is not None):
            found = "nothing" if expected else "a table"
            return Finding(f"{found} for {a.layout_kv}", parameter=name)
    return None


@rule("seqused_given")
def _seqused_given(a: Args, ctx: RuleContext) -> str | None:
    if a.layout_kv != PAGED:
        return None
    missing = [] if a.seqused_ori_kv is not None else ["seqused_ori_kv"]
    if a.has_compressed and a.seqused_cmp_kv is None:
        missing.append("seqused_cmp_kv")
    return f"no {' and no '.join(missing)}" if missing else None


@rule("sinks_given")
def _sinks_given(a: Args, ctx: RuleContext) -> str | None:
    return "nothing" if a.sinks is None else None


@rule("metadata_given")
def _metadata_given(a: Args, ctx: RuleContext) -> str | None:
    return "nothing" if a.metadata is None else None


@rule("alone")
def _alone(a: Args, ctx: RuleContext) -> str | None:
    if a.has_compressed:
        return None
    found = [] if a.cmp_ratio == 1 else [f"cmp_ratio {a.cmp_ratio}"]
    if a.cmp_mask_mode != 0:
        found.append(f"cmp_mask_mode {a.cmp_mask_mode}")
    found += given(a, ("seqused_cmp_kv", "cmp_residual_kv", "cmp_topk_length"))
    return ", ".join(found) or None


def _heads_of(a: Args) -> int:
    return a.q.shape[-2]


@rule("heads")
def _heads(a: Args, ctx: RuleContext) -> str | None:
    return None if 1 <= _heads_of(a) <= ctx.limits["max_heads"] else str(_heads_of(a))


@rule("heads_a2_a3")
def _heads_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    return None if _heads_of(a).bit_count() == 1 else str(_heads_of(a))


@rule("kv_heads")
def _kv_heads(a: Args, ctx: RuleContext) -> Finding | None:
    for name, tensor in given(a, _KEYS).items():
        if tensor.shape[-2] != 1:
            return Finding(str(tensor.shape[-2]), parameter=name)
    return None


@rule("head_size")
def _head_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.q.shape[-1]
    return None if size == ctx.limits["head_size"] else str(size)


@rule("topk")
def _topk(a: Args, ctx: RuleContext) -> str | None:
    indices = a.cmp_sparse_indices
    if indices is None or (indices.dim() > 0 and indices.shape[-1] > 0):
        return None
    return str(list(indices.shape))


@rule("topk_a2_a3")
def _topk_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    indices = a.cmp_sparse_indices
    if indices is None or list(indices.shape[-1:]) in [[k] for k in ctx.limits["topk_a2_a3"]]:
        return None
    return str(list(indices.shape))


@rule("block_size")
def _block_size(a: Args, ctx: RuleContext) -> Finding | None:
    return _wrong_block_size(a, 1, ctx.limits["block_max"])


@rule("block_size_a2_a3")
def _block_size_a2_a3(a: Args, ctx: RuleContext) -> Finding | None:
    return _wrong_block_size(a, ctx.limits["block_multiple"], ctx.limits["block_max"])


def _wrong_block_size(a: Args, multiple: int, most: int) -> Finding | None:
    if a.layout_kv != PAGED:
        return None
    for name, tensor in given(a, _KEYS).items():
        size = tensor.shape[1]
        if not 1 <= size <= most or size % multiple:
            return Finding(str(size), parameter=name)
    return None


@rule("same_dtype")
def _same_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    for name, tensor in given(a, _KEYS).items():
        if tensor.dtype != a.q.dtype:
            found = f"{dtype_name(tensor.dtype)} for q of {dtype_name(a.q.dtype)}"
            return Finding(found, parameter=name)
    return None


@rule("key_size")
def _key_size(a: Args, ctx: RuleContext) -> Finding | None:
    for name, tensor in given(a, _KEYS).items():
        if tensor.shape[-1] != a.q.shape[-1]:
            return Finding(f"{tensor.shape[-1]} for q of {a.q.shape[-1]}", parameter=name)
    return None


@rule("key_batch")
def _key_batch(a: Args, ctx: RuleContext) -> Finding | None:
    for name, tensor in given(a, _KEYS).items():
        if a.layout_kv == "BSND" and tensor.shape[0] != a.batch:
            return Finding(f"{tensor.shape[0]} for {a.batch} requests", parameter=name)
    return None


@rule("lengths")
def _lengths(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_counts(a, a.batch)


@rule("tables")
def _tables(a: Args, ctx: RuleContext) -> Finding | None:
    for name, table in given(a, ("ori_block_table", "cmp_block_table")).items():
        shape = list(table.shape)
        legal = len(shape) == 2 and shape[0] == a.batch and shape[1] > 0
        if not legal or table.dtype != torch.int32:
            found = f"{dtype_name(table.dtype)}{shape} for {a.batch} requests"
            return Finding(found, parameter=name)
    return None


@rule("indices")
def _indices(a: Args, ctx: RuleContext) -> str | None:
    indices = a.cmp_sparse_indices
    if indices is None:
        return None
    expected = (*a.q.shape[:-2], 1)
    if indices.dtype == torch.int32 and tuple(indices.shape[:-1]) == expected:
        return None
    return f"{dtype_name(indices.dtype)}{list(indices.shape)} for q {list(a.q.shape)}"


@rule("topk_length_form")
def _topk_length_form(a: Args, ctx: RuleContext) -> str | None:
    lengths = a.cmp_topk_length
    if lengths is None:
        return None
    if lengths.dtype == torch.int32 and tuple(lengths.shape) == (*a.q.shape[:-2], 1):
        return None
    return f"{dtype_name(lengths.dtype)}{list(lengths.shape)} for q {list(a.q.shape)}"


@rule("sinks")
def _sinks(a: Args, ctx: RuleContext) -> str | None:
    sinks = a.sinks
    if sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (_heads_of(a),)):
        return None
    return f"{dtype_name(sinks.dtype)}{list(sinks.shape)} for {_heads_of(a)} heads"


@rule("metadata")
def _metadata(a: Args, ctx: RuleContext) -> str | None:
    plan = a.metadata
    if plan is None or (plan.dtype == torch.int32 and plan.shape == (ctx.limits["words"],)):
        return None
    return f"{dtype_name(plan.dtype)}{list(plan.shape)}"


@rule("cache_strides")
def _cache_strides(a: Args, ctx: RuleContext) -> str | None:
    return strided(given(a, _KEYS), a.layout_kv, free_axis=True)
