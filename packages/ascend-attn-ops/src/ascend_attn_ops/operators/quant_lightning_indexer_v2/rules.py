"""Predicates of the rules in ``contract.toml``."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.sequence_rules import bad_block_id, bad_length, empty_tensors, shape_of
from .arguments import QuantLightningIndexerV2Arguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule

_HIFLOAT8 = 4
_GROUPED = (3, 5)


@rule("layout_q")
def _layout_q(a: Args, ctx: RuleContext) -> str | None:
    return None if a.layout_q in ctx.limits["q_layouts"] else repr(a.layout_q)


@rule("layout_k")
def _layout_k(a: Args, ctx: RuleContext) -> str | None:
    return None if a.layout_k in ctx.limits["k_layouts"] else repr(a.layout_k)


@rule("ranks")
def _ranks(a: Args, ctx: RuleContext) -> Finding | None:
    for name, tensor, layout in (("q", a.q, a.layout_q), ("k", a.k, a.layout_k)):
        rank = 3 if layout == "TND" else 4
        if tensor.dim() != rank:
            found = f"rank {tensor.dim()} {shape_of(tensor)}"
            return Finding(found, allowed=f"rank {rank} for {layout}", parameter=name)
    return None


@rule("mask_mode")
def _mask_mode(a: Args, ctx: RuleContext) -> str | None:
    return None if a.mask_mode in ctx.limits["mask_modes"] else str(a.mask_mode)


@rule("quant_mode")
def _quant_mode(a: Args, ctx: RuleContext) -> str | None:
    return None if str(a.quant_mode) in ctx.limits["modes"] else str(a.quant_mode)


@rule("quant_mode_a2_a3")
def _quant_mode_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    return None if a.quant_mode == ctx.limits["mode_a2_a3"] else str(a.quant_mode)


@rule("dtypes")
def _dtypes(a: Args, ctx: RuleContext) -> Finding | None:
    legal = ctx.limits["modes"].get(str(a.quant_mode))
    names = ("q", "k", "q_descale", "k_descale", "w")
    found = [dtype_name(getattr(a, name).dtype) for name in names]
    if legal is None or found == legal:
        return None
    return Finding(", ".join(found), allowed=f"{', '.join(legal)} in mode {a.quant_mode}")


@rule("not_empty")
def _not_empty(a: Args, ctx: RuleContext) -> str | None:
    return empty_tensors((("q", a.q), ("k", a.k), ("w", a.w)))


@rule("max_seqlen_q")
def _max_seqlen_q(a: Args, ctx: RuleContext) -> str | None:
    return None if a.max_seqlen_q >= -1 else str(a.max_seqlen_q)


@rule("return_value")
def _return_value(a: Args, ctx: RuleContext) -> str | None:
    return None if a.return_value in (0, 1) else str(a.return_value)


@rule("topk")
def _topk(a: Args, ctx: RuleContext) -> str | None:
    return None if 1 <= a.topk <= ctx.limits["topk_max"] else str(a.topk)


@rule("topk_a2_a3")
def _topk_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    return None if a.topk <= ctx.limits["topk_max_a2_a3"] else str(a.topk)


@rule("cmp_ratio")
def _cmp_ratio(a: Args, ctx: RuleContext) -> str | None:
    return None if 1 <= a.cmp_ratio <= ctx.limits["cmp_ratio_max"] else str(a.cmp_ratio)


@rule("cmp_ratio_a2_a3")
def _cmp_ratio_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    return None if a.cmp_ratio & (a.cmp_ratio - 1) == 0 else str(a.cmp_ratio)


def _unwanted(name: str, tensor: torch.Tensor | None, *, wanted: bool) -> Finding | None:
    if (tensor is not None) == wanted:
        return None
    found = "nothing" if tensor is None else shape_of(tensor)
    return Finding(found, allowed="a tensor" if wanted else "null", parameter=name)


@rule("cu_seqlens")
def _cu_seqlens(a: Args, ctx: RuleContext) -> Finding | None:
    return _unwanted("cu_seqlens_q", a.cu_seqlens_q, wanted=a.layout_q == "TND") or _unwanted(
        "cu_seqlens_k", a.cu_seqlens_k, wanted=a.layout_k == "TND"
    )


@rule("block_table_given")
def _block_table_given(a: Args, ctx: RuleContext) -> Finding | None:
    return _unwanted("block_table", a.block_table, wanted=a.paged)


@rule("seqused_k_given")
def _seqused_k_given(a: Args, ctx: RuleContext) -> str | None:
    return "nothing" if a.paged and a.seqused_k is None else None


@rule("cmp_residual_k_given")
def _cmp_residual_k_given(a: Args, ctx: RuleContext) -> Finding | None:
    return _unwanted("cmp_residual_k", a.cmp_residual_k, wanted=a.compressed_causal)


@rule("metadata_a5")
def _metadata_a5(a: Args, ctx: RuleContext) -> str | None:
    return "nothing" if a.metadata is None else None


@rule("layout_k_a2_a3")
def _layout_k_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    return None if a.paged else a.layout_k


@rule("seqused_q_a2_a3")
def _seqused_q_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    wrong = a.layout_q == "TND" and a.seqused_q is not None
    return "seqused_q with a TND query" if wrong else None


@rule("a5_only")
def _a5_only(a: Args, ctx: RuleContext) -> str | None:
    found = [] if a.output_idx_offset is None else ["output_idx_offset"]
    found += ["return_value 1"] if a.return_value else []
    return ", ".join(found) or None


@rule("heads_a2_a3")
def _heads_a2_a3(a: Args, ctx: RuleContext) -> str | None:
    heads = a.q.shape[-2]
    return None if heads == ctx.limits["heads_a2_a3"] else str(heads)


@rule("heads_a5")
def _heads_a5(a: Args, ctx: RuleContext) -> str | None:
    heads = a.q.shape[-2]
    return None if 1 <= heads <= ctx.limits["max_heads"] else str(heads)


@rule("kv_heads")
def _kv_heads(a: Args, ctx: RuleContext) -> str | None:
    heads = a.k.shape[-2]
    return None if heads == 1 else str(heads)


@rule("head_size")
def _head_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.q.shape[-1]
    return None if size == ctx.limits["head_size"] else str(size)


@rule("block_size")
def _block_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.k.shape[1]
    legal = 0 < size <= ctx.limits["block_max"] and size % ctx.limits["block_multiple"] == 0
    return None if legal or not a.paged else str(size)


@rule("candidate_mode")
def _candidate_mode(a: Args, ctx: RuleContext) -> str | None:
    return None if a.candidate_mode in ctx.limits["candidate_modes"] else str(a.candidate_mode)


@rule("candidate_index")
def _candidate_index(a: Args, ctx: RuleContext) -> str | None:
    missing = a.candidate_mode == 2 and a.candidate_topk_index is None
    return "nothing in candidate_mode 2" if missing else None


@rule("candidate_blocks")
def _candidate_blocks(a: Args, ctx: RuleContext) -> str | None:
    blocks = a.candidate_topk_blocks
    legal = 0 < blocks <= ctx.limits["candidate_blocks_max"]
    return None if legal and blocks % ctx.limits["candidate_blocks_multiple"] == 0 else str(blocks)


@rule("candidate_block_size")
def _candidate_block_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.candidate_block_size
    return None if size == ctx.limits["candidate_block_size"] else str(size)


@rule("candidate_a5")
def _candidate_a5(a: Args, ctx: RuleContext) -> str | None:
    return None if a.candidate_mode == 3 else str(a.candidate_mode)


@rule("layouts")
def _layouts(a: Args, ctx: RuleContext) -> str | None:
    if a.paged or a.layout_q == a.layout_k:
        return None
    return f"q {a.layout_q}, k {a.layout_k}"


@rule("batch")
def _batch(a: Args, ctx: RuleContext) -> str | None:
    return None if 0 < a.batch < ctx.limits["batch_end"] else str(a.batch)


@rule("shapes")
def _shapes(a: Args, ctx: RuleContext) -> Finding | None:
    expected = {"w": tuple(a.q.shape[:-1])}
    if a.quant_mode == _HIFLOAT8:
        expected |= {"q_descale": (1,), "k_descale": (1,)}
    else:
        tail = (ctx.limits["head_size"] // 64, 2) if a.quant_mode in _GROUPED else ()
        expected |= {"q_descale": (*a.q.shape[:-1], *tail), "k_descale": (*a.k.shape[:-1], *tail)}
    if not a.paged and a.layout_k == "BSND":
        expected["k"] = (a.batch, *a.k.shape[1:-1], a.q.shape[-1])
    expected |= _length_shapes(a)
    for name, shape in expected.items():
        tensor: torch.Tensor | None = getattr(a, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            return Finding(shape_of(tensor), allowed=str(list(shape)), parameter=name)
    return None


def _length_shapes(a: Args) -> dict[str, tuple[int, ...]]:
    batch = a.batch
    shapes: dict[str, tuple[int, ...]] = {"metadata": (1024,)}
    shapes |= dict.fromkeys(("seqused_q", "seqused_k", "cmp_residual_k"), (batch,))
    return shapes | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), (batch + 1,))


@rule("block_table")
def _block_table(a: Args, ctx: RuleContext) -> str | None:
    table = a.block_table
    if table is None:
        return None
    legal = table.dim() == 2 and table.shape[0] == a.batch and table.shape[1] > 0
    return None if legal else f"{shape_of(table)} for {a.batch} requests"


@rule("int32")
def _int32(a: Args, ctx: RuleContext) -> str | None:
    names = (*_length_shapes(a), "block_table", "candidate_topk_index")
    tensors = {name: getattr(a, name) for name in names}
    found = [
        f"{name} {dtype_name(tensor.dtype)}"
        for name, tensor in tensors.items()
        if tensor is not None and tensor.dtype != torch.int32
    ]
    return ", ".join(found) or None


@rule("lengths_values")
def _lengths_values(a: Args, ctx: RuleContext) -> Finding | None:
    k_room = a.k.shape[0 if a.layout_k == "TND" else 1]
    if a.block_table is not None:
        k_room *= a.block_table.shape[1]
    q_room = a.q.shape[0 if a.layout_q == "TND" else 1]
    cases = (
        ("cu_seqlens_q", q_room, True),
        ("cu_seqlens_k", k_room, True),
        ("seqused_q", q_room, False),
        ("seqused_k", k_room, False),
    )
    for name, room, cumulative in cases:
        found = bad_length(getattr(a, name), room, cumulative=cumulative)
        if found is not None:
            return Finding(found, parameter=name)
    return None


@rule("block_ids")
def _block_ids(a: Args, ctx: RuleContext) -> str | None:
    if a.block_table is None or a.seqused_k is None:
        return None
    return bad_block_id(a.block_table, a.seqused_k, a.k.shape[0], a.k.shape[1])
