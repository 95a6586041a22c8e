"""Rules on head sizes, ropes, masks, shifts and quantisation."""

from __future__ import annotations

import torch

from ....arguments import dtype_name
from ....contract import Finding, RuleContext
from .call import TEMPLATE_MODES, TREE_MODE, Call
from .contracts import shared_rule


@shared_rule("rope_pair")
def _rope_pair(c: Call, ctx: RuleContext) -> str | None:
    if (c.query_rope is None) == (c.key_rope is None):
        return None
    return f"{'key_rope' if c.query_rope is None else 'query_rope'} alone"


@shared_rule("layout_without_rope")
def _layout_without_rope(c: Call, ctx: RuleContext) -> str | None:
    return None if c.rope or c.layout in ctx.limits["layouts_without_rope"] else repr(c.layout)


@shared_rule("mla_head_size")
def _mla_head_size(c: Call, ctx: RuleContext) -> str | None:
    return None if not c.rope or c.q.size in ctx.limits["mla_head_sizes"] else str(c.q.size)


@shared_rule("mla_layout")
def _mla_layout(c: Call, ctx: RuleContext) -> Finding | None:
    if not c.rope or c.q.size not in ctx.limits["mla_head_sizes"]:
        return None
    allowed = ctx.limits[f"mla_layouts_{c.q.size}"]
    if c.layout in allowed:
        return None
    return Finding(f"{c.layout} with D {c.q.size}", f"one of {', '.join(allowed)}")


def _absorbed(c: Call, ctx: RuleContext) -> bool:
    return c.rope and c.q.size == ctx.limits["absorbed_size"]


@shared_rule("mla_heads")
def _mla_heads(c: Call, ctx: RuleContext) -> str | None:
    if not _absorbed(c, ctx):
        return None
    legal = c.heads in ctx.limits["mla_heads"] and c.kv_heads == 1
    return None if legal else f"N {c.heads}, KN {c.kv_heads}"


@shared_rule("mla_mask")
def _mla_mask(c: Call, ctx: RuleContext) -> str | None:
    if not _absorbed(c, ctx):
        return None
    if c.mode in (1, 2):
        return f"sparse_mode {c.mode}"
    return "a mask in mode 0" if c.mode == 0 and c.mask is not None else None


@shared_rule("mla_extras")
def _mla_extras(c: Call, ctx: RuleContext) -> str | None:
    if not _absorbed(c, ctx):
        return None
    extras = {
        "pse_shift": c.pse is not None,
        "shared prefix": c.prefixed,
        "padding sizes": any(size is not None for size in c.padding),
        "antiquant scales": c.pair_scale is not None or (c.key_scale is not None and _half(c)),
        "output quantisation": c.out_scale is not None,
        "learnable_sink": c.sink is not None,
        "empty keys": c.no_keys,
    }
    return ", ".join(name for name, given in extras.items() if given) or None


def _half(c: Call) -> bool:
    return c.query.dtype != torch.int8


@shared_rule("rope_dtype")
def _rope_dtype(c: Call, ctx: RuleContext) -> Finding | None:
    if c.query_rope is None or c.key_rope is None:
        return None
    want = c.query.dtype if _half(c) else torch.bfloat16
    for name, rope in (("query_rope", c.query_rope), ("key_rope", c.key_rope)):
        if rope.dtype != want:
            return Finding(dtype_name(rope.dtype), dtype_name(want), name)
    return None


@shared_rule("rope_shape")
def _rope_shape(c: Call, ctx: RuleContext) -> Finding | None:
    if c.query_rope is None or c.key_rope is None or not isinstance(c.key, torch.Tensor):
        return None
    size = _rope_width(c)
    pairs = (
        ("query_rope", c.query_rope, c.query, c.heads, "H" in c.base),
        ("key_rope", c.key_rope, c.key, c.kv_heads, _flat_keys(c)),
    )
    for name, rope, beside, heads, flat in pairs:
        want = (*beside.shape[:-1], heads * size if flat else size)
        if c.paged and name == "key_rope" and c.key.dim() == 5:
            inner = rope.shape[-1] if rope.dim() else 0
            want = (*beside.shape[:2], size // inner if inner else 0, beside.shape[3], inner)
        if tuple(rope.shape) != want:
            return Finding(str(list(rope.shape)), str(list(want)), name)
    return None


def _rope_width(c: Call) -> int:
    """Head size of the ropes, by the query's; 0 when there is none."""
    if c.query_rope is None or c.query_rope.dim() != c.query.dim():
        return 0
    return c.query_rope.shape[-1] // (c.heads if "H" in c.base else 1)


@shared_rule("rope_size")
def _rope_size(c: Call, ctx: RuleContext) -> str | None:
    return None if not c.rope or _rope_width(c) == ctx.limits["rope_size"] else str(_rope_width(c))


def _flat_keys(c: Call) -> bool:
    return c.k.form == "BnBsH" if c.paged else "H" in c.base


@shared_rule("head_size")
def _head_size(c: Call, ctx: RuleContext) -> Finding | None:
    size = c.q.size
    if not 0 < size <= ctx.limits["max_head_size"]:
        return Finding(str(size), f"1 .. {ctx.limits['max_head_size']}")
    if not c.packed or c.rope or size in ctx.limits["packed_head_sizes"]:
        return None
    return Finding(f"{size} in {c.layout}", f"one of {ctx.limits['packed_head_sizes']}")


@shared_rule("head_alignment")
def _head_alignment(c: Call, ctx: RuleContext) -> str | None:
    multiple = ctx.limits["head_multiple"]
    return str(c.q.size) if not c.packed and not c.single and c.q.size % multiple else None


@shared_rule("converting_head_size")
def _converting_head_size(c: Call, ctx: RuleContext) -> Finding | None:
    if c.packed or c.rope or c.base == c.target:
        return None
    if c.layout == "BNSD_BSND":
        refused = ctx.limits["bnsd_bsnd_refused_sizes"]
        found = f"{c.q.size} in BNSD_BSND"
        return Finding(found, f"any but {refused}") if c.q.size in refused else None
    allowed = ctx.limits["converting_head_sizes"]
    return None if c.q.size in allowed else Finding(f"{c.q.size} in {c.layout}", f"{allowed}")


@shared_rule("value_size")
def _value_size(c: Call, ctx: RuleContext) -> str | None:
    size = c.v.size
    if c.no_keys or size in (None, c.q.size) or [c.q.size, size] == list(ctx.limits["wide_pair"]):
        return None
    return f"{size} with D {c.q.size}"


@shared_rule("wide_value")
def _wide_value(c: Call, ctx: RuleContext) -> str | None:
    wide = c.packed and not c.rope and c.v.size == ctx.limits["wide_pair"][0]
    if not wide or not (c.paged or c.kv_heads != c.heads):
        return None
    return f"a value head size of {c.v.size} with {'paged' if c.paged else 'grouped'} keys"


@shared_rule("mask_given")
def _mask_given(c: Call, ctx: RuleContext) -> str | None:
    needed = c.mode in (1, *TEMPLATE_MODES, TREE_MODE)
    return f"nothing in mode {c.mode}" if needed and c.mask is None else None


@shared_rule("mask_dtype")
def _mask_dtype(c: Call, ctx: RuleContext) -> str | None:
    if c.mask is None or dtype_name(c.mask.dtype) in ctx.limits["mask_dtypes"]:
        return None
    return dtype_name(c.mask.dtype)


@shared_rule("mask_rank")
def _mask_rank(c: Call, ctx: RuleContext) -> str | None:
    if c.mask is None or c.mode == TREE_MODE or c.mask.dim() in (2, 3, 4):
        return None
    return f"rank {c.mask.dim()} {list(c.mask.shape)}"


@shared_rule("packed_mask")
def _packed_mask(c: Call, ctx: RuleContext) -> str | None:
    if not c.packed or c.mode == TREE_MODE:
        return None
    if c.mode in (1, 2):
        return f"sparse_mode {c.mode} with {c.layout}"
    return "a mask in mode 0" if c.mode == 0 and c.mask is not None else None


@shared_rule("template")
def _template(c: Call, ctx: RuleContext) -> str | None:
    if c.mask is None or c.mode not in TEMPLATE_MODES or c.template_shaped(ctx.limits["template"]):
        return None
    ignored = c.effective_mode == 1 and ctx.family in (None, *ctx.limits["classic_families"])
    return None if ignored else f"a mask {list(c.mask.shape)} in mode {c.mode}"


@shared_rule("full_mask")
def _full_mask(c: Call, ctx: RuleContext) -> Finding | None:
    if c.mask is None or c.packed or c.effective_mode not in (0, 1) or c.no_keys:
        return None
    shape, rows, keys = tuple(c.mask.shape), c.q.length, c.capacity
    if len(shape) == 2 and c.rope:
        return Finding(f"a mask {list(shape)} with ropes", "rank 3 or 4 with ropes")
    heads = shape[1:-2]  # the 1 of (B, 1, S, KS)
    batch = shape[0] if len(shape) > 2 else 1
    fits = shape[-2] >= rows and shape[-1] >= keys
    if len(shape) == 2 and c.single:
        fits = shape[0] in (1, c.q.batch) and shape[1] >= keys
    if fits and batch in (1, c.q.batch) and all(size == 1 for size in heads):
        return None
    want = f"(1 or {c.q.batch}, [1,] {rows} or more, {keys} or more)"
    return Finding(f"a mask {list(shape)}", want)


@shared_rule("pse_dtype")
def _pse_dtype(c: Call, ctx: RuleContext) -> str | None:
    if c.pse is None or c.pse.dtype == c.query.dtype:
        return None
    return dtype_name(c.pse.dtype)


@shared_rule("pse_shape")
def _pse_shape(c: Call, ctx: RuleContext) -> Finding | None:
    if c.pse is None:
        return None
    if c.packed:
        return Finding(f"a shift with {c.layout}", "no shift with T layouts")
    shape, want = tuple(c.pse.shape), (c.q.batch, c.heads, c.q.length, c.capacity)
    fits = len(shape) == 4 and shape[0] in (1, want[0]) and shape[1] == want[1]
    if fits and shape[2] >= want[2] and shape[3] >= want[3]:
        return None
    return Finding(str(list(shape)), f"(1 or {want[0]}, {want[1]}, {want[2]}, {want[3]})")


@shared_rule("kv_scale_pair")
def _kv_scale_pair(c: Call, ctx: RuleContext) -> str | None:
    if (c.key_scale is None) == (c.value_scale is None):
        return None
    return f"{'value' if c.key_scale is None else 'key'} scale alone"


@shared_rule("scale_without_int8")
def _scale_without_int8(c: Call, ctx: RuleContext) -> str | None:
    scaled = c.key_scale is not None or c.pair_scale is not None
    if not scaled or c.int8_keys or c.query.dtype == torch.int8:
        return None
    return f"scales for keys of {dtype_name(c.first_key.dtype)}"


@shared_rule("int8_without_scale")
def _int8_without_scale(c: Call, ctx: RuleContext) -> str | None:
    scaled = c.key_scale is not None or c.pair_scale is not None
    return f"{dtype_name(c.first_key.dtype)} keys" if c.int8_keys and not scaled else None


@shared_rule("scale_dtype")
def _scale_dtype(c: Call, ctx: RuleContext) -> Finding | None:
    full = c.query.dtype == torch.int8
    per_channel = torch.float32 if full else c.query.dtype
    scales = (
        ("antiquant_scale", c.pair_scale, 0),
        ("key_antiquant_scale", c.key_scale, c.key_mode),
        ("value_antiquant_scale", c.value_scale, c.value_mode),
    )
    for name, scale, mode in scales:
        want = per_channel if mode == 0 else torch.float32
        if scale is not None and scale.dtype != want:
            return Finding(f"{dtype_name(scale.dtype)} in mode {mode}", dtype_name(want), name)
    return None


@shared_rule("post_quant")
def _post_quant(c: Call, ctx: RuleContext) -> str | None:
    scale, offset = c.out_scale, c.out_offset
    if scale is None:
        return None if offset is None else "an offset without a scale"
    if dtype_name(scale.dtype) not in ctx.limits["out_scale_dtypes"]:
        return f"a scale of {dtype_name(scale.dtype)}"
    if scale.numel() not in (1, c.heads * (c.v.size or 0)):
        return f"a scale {list(scale.shape)} for N {c.heads}, D {c.v.size}"
    if offset is not None and (offset.dtype, offset.shape) != (scale.dtype, scale.shape):
        return f"scale {dtype_name(scale.dtype)}{list(scale.shape)}, offset " + (
            f"{dtype_name(offset.dtype)}{list(offset.shape)}"
        )
    return None


@shared_rule("post_quant_rows")
def _post_quant_rows(c: Call, ctx: RuleContext) -> str | None:
    if c.out_scale is None or c.packed or c.mode not in (3, 4):
        return None
    after = c.nxt if c.mode == 4 else 0
    spare = c.capacity - c.q.length + after
    return f"S {c.q.length}, KS {c.capacity}, next {after}" if spare < 0 else None


@shared_rule("block_ids")
def _block_ids(c: Call, ctx: RuleContext) -> str | None:
    if c.block_table is None:
        return None
    lengths = torch.tensor(c.lengths(c.kv_lens, c.capacity), dtype=torch.long)
    used = torch.arange(c.block_table.shape[1]) * c.block_size < lengths[:, None]
    table, blocks = c.block_table.cpu(), c.first_key.shape[0]
    wrong = used & ((table < 0) | (table >= blocks))
    if not wrong.any():
        return None
    row, column = wrong.nonzero()[0].tolist()
    return f"block_table[{row}, {column}] = {int(table[row, column])} of {blocks}"


@shared_rule("template_values")
def _template_values(c: Call, ctx: RuleContext) -> str | None:
    if c.mask is None or c.mode not in TEMPLATE_MODES or not c.template_shaped():
        return None
    mask = c.mask.reshape(c.mask.shape[-2:]).bool()
    wrong = (mask != torch.ones_like(mask).triu(1)).nonzero()
    return f"{int(mask[tuple(wrong[0])])} at {wrong[0].tolist()}" if wrong.numel() else None
