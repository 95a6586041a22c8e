"""Predicates of the rules in ``contract.toml``; version 2 of the operator shares them."""

from __future__ import annotations

import torch

from ...arguments import dtype_name
from ...contract import Contract, Finding, RuleContext
from .._shared.findings import (
    first_element,
    given,
    wrong_dtype,
    wrong_rank,
    wrong_shape,
)
from .._shared.formats import FRACTAL_NZ, storage_format
from .arguments import MlaPrologV3Arguments as Args

CONTRACT: Contract[Args] = Contract.load(__package__)
rule = CONTRACT.rule
_FUSED = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
_GAMMAS = ("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv")
_CACHES = ("kv_cache", "kr_cache")
_PLAIN = ("weight_uk", *_GAMMAS, "rope_sin", "rope_cos")
_SCALES = (
    "dequant_scale_x",
    "dequant_scale_w_dq",
    "dequant_scale_w_uq_qr",
    "dequant_scale_w_dkv_kr",
)
_QUANTISED = {1: ("int8",), 2: ("int8",), 3: ("float8_e4m3fn",), 4: ("float8_e4m3fn",)}
_HIFLOAT8 = ("uint8",)
_BYTES = ("int8", "uint8", "float8_e4m3fn")


@rule("cache_mode")
def _cache_mode(a: Args, ctx: RuleContext) -> str | None:
    return None if a.cache_mode in ctx.limits["modes"] else repr(a.cache_mode)


@rule("quant_combination")
def _quant_combination(a: Args, ctx: RuleContext) -> str | None:
    found = f"{a.weight_quant_mode} {a.kv_cache_quant_mode} {a.query_quant_mode}"
    return None if found in ctx.limits["combinations"] else found


@rule("token_rank")
def _token_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("token_x",), 2, 3)


@rule("rope_rank")
def _rope_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("rope_sin", "rope_cos"), a.token_x.dim())


@rule("weight_uk_rank")
def _weight_uk_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, ("weight_uk",), 3)


@rule("weight_rank")
def _weight_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, _FUSED, 2)


@rule("gamma_rank")
def _gamma_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, _GAMMAS, 1)


@rule("cache_rank")
def _cache_rank(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_rank(a, _CACHES, 3 if a.cache_mode == "TND" else 4)


@rule("index_dtype")
def _index_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    return wrong_dtype(a, ("cache_index",), ("int64",))


@rule("weight_dtype")
def _weight_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    mode, floats = a.weight_quant_mode, ctx.limits["floats"]
    eight_bit = _QUANTISED.get(mode, _HIFLOAT8)
    whole = floats if mode < 2 else eight_bit
    return (
        wrong_dtype(a, ("token_x", "weight_dq", "weight_dkv_kr"), whole)
        or wrong_dtype(a, ("weight_uq_qr",), eight_bit if mode else floats)
        or wrong_dtype(a, _PLAIN, floats)
    )


@rule("bfloat16")
def _bfloat16(a: Args, ctx: RuleContext) -> Finding | None:
    names = _PLAIN if a.weight_quant_mode > 1 else (*_PLAIN, "token_x")
    return wrong_dtype(a, names, ("bfloat16",))


@rule("product_quant")
def _product_quant(a: Args, ctx: RuleContext) -> str | None:
    return str(a.weight_quant_mode) if a.weight_quant_mode > 2 else None


@rule("index_given")
def _index_given(a: Args, ctx: RuleContext) -> str | None:
    if (a.cache_index is not None) == a.is_paged:
        return None
    return f"{'absent' if a.is_paged else 'given'} in the mode {a.cache_mode}"


def _missing(a: Args, names: tuple[str, ...]) -> Finding | None:
    absent = [name for name in names if getattr(a, name) is None]
    return Finding("nothing (null)", parameter=", ".join(absent)) if absent else None


@rule("scales_given")
def _scales_given(a: Args, ctx: RuleContext) -> Finding | None:
    if a.weight_quant_mode == 0:
        return None
    return _missing(a, ("dequant_scale_w_uq_qr",) if a.weight_quant_mode == 1 else _SCALES)


@rule("cache_scales_given")
def _cache_scales_given(a: Args, ctx: RuleContext) -> Finding | None:
    needed = {1: ("quant_scale_ckv",), 2: ("quant_scale_ckv", "quant_scale_ckr")}
    return _missing(a, needed.get(a.kv_cache_quant_mode, ()))


@rule("clip_given")
def _clip_given(a: Args, ctx: RuleContext) -> str | None:
    wrong = a.k_nope_clip_alpha is not None and a.kv_cache_quant_mode != 3
    return f"given with kv_cache_quant_mode {a.kv_cache_quant_mode}" if wrong else None


@rule("lengths_given")
def _lengths_given(a: Args, ctx: RuleContext) -> str | None:
    if not a.by_page or a.token_x.dim() == 3:
        return None
    if a.actual_seq_len is None:
        return "nothing (null)"
    name = dtype_name(a.actual_seq_len.dtype)
    return None if name == "int32" else name


@rule("hifloat8_named")
def _hifloat8_named(a: Args, ctx: RuleContext) -> Finding | None:
    if a.weight_quant_mode != 5:
        return None
    names = ("token_x_dtype", *(f"{name}_dtype" for name in _FUSED))
    if a.kv_cache_quant_mode in (1, 3):
        names = (*names, "kv_cache_dtype")
    return _missing(a, names)


@rule("scale_dtype")
def _scale_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    shared = "float8_e8m0fnu" if a.weight_quant_mode == 3 else "float32"
    others = ("quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq", "k_nope_clip_alpha")
    return wrong_dtype(a, _SCALES, (shared,)) or wrong_dtype(a, others, ("float32",))


@rule("cache_dtype")
def _cache_dtype(a: Args, ctx: RuleContext) -> Finding | None:
    floats: tuple[str, ...] = (dtype_name(a.rope_sin.dtype),)
    latent = {0: floats, 2: ("int8",)}.get(a.kv_cache_quant_mode, _BYTES)
    rotary = {2: ("int8",), 3: (*_BYTES, *floats)}.get(a.kv_cache_quant_mode, floats)
    for name, allowed in (("kv_cache", latent), ("kr_cache", rotary)):
        found = wrong_dtype(a, (name,), allowed)
        if found:
            mode = f"{' or '.join(allowed)} with kv_cache_quant_mode {a.kv_cache_quant_mode}"
            return Finding(found.found, mode, name)
    return None


@rule("smooth_mxfp8")
def _smooth_mxfp8(a: Args, ctx: RuleContext) -> str | None:
    wrong = a.smooth_scales_cq is not None and a.weight_quant_mode in (0, 3)
    return f"given with weight_quant_mode {a.weight_quant_mode}" if wrong else None


@rule("he")
def _he(a: Args, ctx: RuleContext) -> str | None:
    size = a.token_x.shape[-1]
    return None if size in ctx.limits["he"] else f"He {size}"


@rule("hcq")
def _hcq(a: Args, ctx: RuleContext) -> str | None:
    size = a.weight_dq.shape[1]
    return None if size in ctx.limits["hcq"] else f"Hcq {size}"


@rule("heads")
def _heads(a: Args, ctx: RuleContext) -> str | None:
    heads = a.weight_uk.shape[0]
    return None if heads in ctx.limits["heads"] else f"N {heads}"


@rule("head_size")
def _head_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.weight_uk.shape[1]
    return None if size in ctx.limits["head_sizes"] else f"D {size}"


@rule("latent")
def _latent(a: Args, ctx: RuleContext) -> str | None:
    found = a.weight_uk.shape[2], a.rope_sin.shape[-1]
    legal = found == (ctx.limits["latent"], ctx.limits["rope"])
    return None if legal else f"Hckv {found[0]}, Dr {found[1]}"


@rule("block_size")
def _block_size(a: Args, ctx: RuleContext) -> str | None:
    size = a.kv_cache.shape[1]
    limits = ctx.limits
    legal = size % limits["block_multiple"] == 0 and 0 < size <= limits["block_size"]
    return None if legal or not a.is_paged else str(size)


@rule("shapes")
def _shapes(a: Args, ctx: RuleContext) -> Finding | None:
    heads, size, latent = a.weight_uk.shape
    hidden, rope, low = a.token_x.shape[-1], a.rope_sin.shape[-1], a.rmsnorm_gamma_cq.shape[0]
    if rope % 2:
        return Finding(f"Dr {rope}", "an even Dr", "rope_sin")
    query = heads * (size + rope)
    expected: dict[str, tuple[int, ...]] = {
        "weight_dq": (hidden, low),
        "weight_uq_qr": (low, query),
        "weight_dkv_kr": (hidden, latent + rope),
        "rmsnorm_gamma_ckv": (latent,),
        "rope_sin": (*a.lead, rope),
        "rope_cos": (*a.lead, rope),
        "dequant_scale_w_dq": (1, low),
        "dequant_scale_w_uq_qr": (1, query),
        "dequant_scale_w_dkv_kr": (1, latent + rope),
        "quant_scale_ckr": (1, rope),
        "smooth_scales_cq": (1, low),
        "k_nope_clip_alpha": (1,),
    }
    if a.weight_quant_mode != 3:
        expected["dequant_scale_x"] = (a.tokens, 1)
    else:  # a scale per group of 32; the other shapes of mxfp8 are not documented
        expected = {k: v for k, v in expected.items() if not k.startswith("dequant")}
    return wrong_shape(a, expected) or _latent_scale(a, latent)


def _latent_scale(a: Args, latent: int) -> Finding | None:
    scale = a.quant_scale_ckv
    sizes = (latent,) if a.kv_cache_quant_mode == 2 else (1, latent)
    if scale is None or scale.numel() in sizes:
        return None
    allowed = " or ".join(map(str, sizes)) + " elements"
    return Finding(str(list(scale.shape)), allowed, "quant_scale_ckv")


@rule("cache_shape")
def _cache_shape(a: Args, ctx: RuleContext) -> Finding | None:
    latent = a.weight_uk.shape[2]
    lead: tuple[int, ...] = tuple(a.kv_cache.shape[:2]) if a.is_paged else a.lead
    if a.kv_cache_quant_mode == 3:
        return wrong_shape(a, {"kv_cache": (*lead, 1, ctx.limits["packed"])})
    rope = a.rope_sin.shape[-1]
    return wrong_shape(a, {"kv_cache": (*lead, 1, latent), "kr_cache": (*lead, 1, rope)})


@rule("index_shape")
def _index_shape(a: Args, ctx: RuleContext) -> Finding | None:
    return None if a.by_page else wrong_shape(a, {"cache_index": a.lead})


@rule("nz_shape")
def _nz_shape(a: Args, ctx: RuleContext) -> Finding | None:
    for name, cache in given(a, _CACHES).items():
        inner = 32 // cache.element_size()
        if a.is_nz and (cache.shape[-1] % inner or not cache.is_contiguous()):
            return Finding(f"{list(cache.shape)} strides {cache.stride()}", parameter=name)
    return None


@rule("weight_format")
def _weight_format(a: Args, ctx: RuleContext) -> Finding | None:
    for name, weight in given(a, _FUSED).items():
        found = storage_format(weight)
        if found not in (None, FRACTAL_NZ):
            return Finding(f"format {found}", parameter=name)
    return None


def _slots(a: Args) -> torch.Tensor | None:
    return None if a.by_page else a.cache_index


@rule("index_range")
def _index_range(a: Args, ctx: RuleContext) -> str | None:
    slots = _slots(a)
    if slots is None or not a.kv_cache.numel():
        return None
    end = a.kv_cache.shape[0] * a.kv_cache.shape[1]
    found = first_element("cache_index", slots, slots >= end)
    return found and f"{found} of {end} slots"


@rule("index_unique")
def _index_unique(a: Args, ctx: RuleContext) -> str | None:
    slots = _slots(a)
    if slots is None:
        return None
    values, counts = slots[slots >= 0].unique(return_counts=True)
    twice = values[counts > 1]
    return f"slot {int(twice[0])} {int(counts[counts > 1][0])} times" if twice.numel() else None
