"""Legal and illegal argument sets of mla_prolog_v3."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, retyped, tensor

_TABLES = ("weight_uk", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos")
_WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")


def flat(hidden: int = 7168, heads: int = 32, size: int = 128, latent: int = 512) -> Data:
    """8 tokens (T, He)."""
    low = 1536
    return {
        "token_x": tensor(8, hidden),
        "weight_dq": tensor(hidden, low),
        "weight_uq_qr": tensor(low, heads * (size + 64)),
        "weight_uk": tensor(heads, size, latent),
        "weight_dkv_kr": tensor(hidden, latent + 64),
        "rmsnorm_gamma_cq": tensor(low),
        "rmsnorm_gamma_ckv": tensor(latent),
        "rope_sin": tensor(8, 64),
        "rope_cos": tensor(8, 64),
        "cache_index": tensor(8, dtype="int64"),
        "kv_cache": tensor(4, 128, 1, latent),
        "kr_cache": tensor(4, 128, 1, 64),
    }


def low_rank(low: int) -> Data:
    """The tensors of another Hcq."""
    return {
        "weight_dq": tensor(7168, low),
        "weight_uq_qr": tensor(low, 32 * 192),
        "rmsnorm_gamma_cq": tensor(low),
    }


def int8_scales() -> Data:
    """The dequantisation scales of weight_quant_mode 2."""
    return {
        "dequant_scale_x": tensor(8, 1, dtype="float32"),
        "dequant_scale_w_dq": tensor(1, 1536, dtype="float32"),
        "dequant_scale_w_uq_qr": tensor(1, 32 * 192, dtype="float32"),
        "dequant_scale_w_dkv_kr": tensor(1, 576, dtype="float32"),
    }


def full_int8(base: Data) -> Data:
    """Everything int8 with a cache quantised per tensor."""
    eight = retyped(base, "int8", "token_x", *_WEIGHTS, "kv_cache")
    scale = {"quant_scale_ckv": tensor(1, dtype="float32")}
    return base | eight | int8_scales() | scale


def block_of(size: int) -> Data:
    """Caches of another block size."""
    return {"kv_cache": tensor(4, size, 1, 512), "kr_cache": tensor(4, size, 1, 64)}


def _batched(base: Data) -> Data:
    return base | {
        "token_x": tensor(2, 4, 7168),
        "rope_sin": tensor(2, 4, 64),
        "rope_cos": tensor(2, 4, 64),
        "cache_index": tensor(2, 4, dtype="int64"),
    }


def _mxfp8(base: Data) -> Data:
    eight = retyped(base, "float8_e4m3fn", "token_x", *_WEIGHTS)
    shapes = {
        "dequant_scale_x": (8, 224),
        "dequant_scale_w_dq": (1536, 224),
        "dequant_scale_w_uq_qr": (6144, 48),
        "dequant_scale_w_dkv_kr": (576, 224),
    }
    scales = {n: tensor(*shape, dtype="float8_e8m0fnu") for n, shape in shapes.items()}
    return base | eight | scales | {"weight_quant_mode": 3}


def _hifloat8(base: Data, **named: int) -> Data:
    eight = retyped(base, "uint8", "token_x", *_WEIGHTS)
    return base | eight | int8_scales() | {"weight_quant_mode": 5} | named


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    base = flat()
    modes = {"weight_quant_mode": 2, "kv_cache_quant_mode": 1, "query_quant_mode": 1}
    yield Sample("flat", base, "A3")
    yield Sample("batched", _batched(base) | {"cache_mode": "PA_NZ", "query_norm_flag": True}, "A2")
    yield Sample("full_int8", full_int8(base) | modes, "A3")
    yield Sample("mxfp8", _mxfp8(base), "A5")
    number = 290
    names = {f"{name}_dtype": number for name in ("token_x", *_WEIGHTS)}
    yield Sample("hifloat8", _hifloat8(base, **names), "A5")
    unpaged = {"kv_cache": tensor(8, 1, 512), "kr_cache": tensor(8, 1, 64), "cache_index": None}
    yield Sample("unpaged", base | unpaged | {"cache_mode": "TND"}, "A3")
    for rule, changes in (_broken(base) | _broken_quant(base, modes)).items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    for rule, changes in broken_sizes().items():
        yield Sample(f"broken_{rule}", base | changes, "A3", (rule,))
        yield Sample(f"{rule}_without_product", base | changes)
    floats = base | retyped(base, "float32", "token_x", *_TABLES, *_WEIGHTS, "kv_cache", "kr_cache")
    yield Sample("broken_bfloat16", floats, "A3", ("bfloat16",))
    yield Sample("broken_product_quant", _mxfp8(base), "A3", ("product_quant",))
    yield Sample("broken_hifloat8_named", _hifloat8(base), "A5", ("hifloat8_named",))


def broken_sizes() -> dict[str, Data]:
    """Sizes that no kernel was built for, by rule; version 2 shares them."""
    return {
        "he": flat(hidden=512),
        "hcq": low_rank(512),
        "heads": flat(heads=96),
        "head_size": flat(size=64),
        "latent": flat(latent=256),
        "block_size": block_of(24),
    }


def _broken(base: Data) -> dict[str, Data]:
    strided = tensor(4, 128, 1, 64, strides=[16384, 128, 64, 1])
    return {
        "cache_mode": {"cache_mode": "PA"},
        "token_rank": {"token_x": tensor(1, 2, 4, 7168)},
        "rope_rank": {"token_x": tensor(2, 4, 7168)},
        "weight_uk_rank": {"weight_uk": tensor(4096, 512)},
        "weight_rank": {"weight_dq": tensor(1, 7168, 1536)},
        "gamma_rank": {"rmsnorm_gamma_cq": tensor(1, 1536)},
        "cache_rank": {"kv_cache": tensor(4, 128, 512)},
        "index_dtype": {"cache_index": tensor(8, dtype="int32")},
        "index_given": {"cache_index": None},
        "lengths_given": {"cache_mode": "PA_BLK_BSND"},
        "shapes": {"weight_dkv_kr": tensor(7168, 512)},
        "cache_shape": {"kr_cache": tensor(4, 64, 1, 64)},
        "index_shape": {"cache_index": tensor(7, dtype="int64")},
        "nz_shape": {"cache_mode": "PA_NZ", "kr_cache": strided},
    }


def _broken_quant(base: Data, modes: Data) -> dict[str, Data]:
    eight = full_int8(base) | modes
    return {
        "quant_combination": modes | {"query_quant_mode": 0},
        "weight_dtype": {"weight_quant_mode": 1},
        "scales_given": eight | {"dequant_scale_w_dq": None},
        "cache_scales_given": eight | {"quant_scale_ckv": None},
        "clip_given": {"k_nope_clip_alpha": tensor(1, dtype="float32")},
        "scale_dtype": eight | {"dequant_scale_x": tensor(8, 1)},
        "cache_dtype": retyped(base, "int8", "kv_cache"),
        "smooth_mxfp8": {"smooth_scales_cq": tensor(1, 1536, dtype="float32")},
    }
