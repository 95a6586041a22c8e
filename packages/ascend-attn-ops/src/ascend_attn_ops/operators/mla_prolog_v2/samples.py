"""Legal and illegal argument sets of mla_prolog_v2."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, retyped, tensor
from ..mla_prolog_v3.samples import block_of, broken_sizes, flat, full_int8

_FLOATS = ("token_x", "weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr", "kv_cache",
           "kr_cache", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos")  # fmt: skip


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    base = flat()
    yield Sample("flat", base, "A2")
    yield Sample("full_int8", full_int8(base), "A3")
    per_channel = {
        **retyped(base, "int8", "weight_uq_qr", "kv_cache", "kr_cache"),
        "dequant_scale_w_uq_qr": tensor(1, 32 * 192, dtype="float32"),
        "quant_scale_ckv": tensor(1, 512, dtype="float32"),
        "quant_scale_ckr": tensor(1, 64, dtype="float32"),
    }
    yield Sample("per_channel", base | per_channel | {"cache_mode": "PA_NZ"}, "A2")
    for rule, changes in _broken(base).items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    for rule, changes in (broken_sizes() | {"block_size": block_of(32)}).items():
        yield Sample(f"broken_{rule}", base | changes, "A3", (rule,))
    yield Sample("broken_bfloat16", base | retyped(base, "float32", *_FLOATS), "A3", ("bfloat16",))
    many = {
        "token_x": tensor(1, 17, 7168),
        "rope_sin": tensor(1, 17, 64),
        "rope_cos": tensor(1, 17, 64),
        "cache_index": tensor(1, 17, dtype="int64"),
    }
    yield Sample("broken_token_count", base | many, "A2", ("token_count",))
    yield Sample("many_tokens_without_product", base | many)


def _broken(base: Data) -> dict[str, Data]:
    eight = full_int8(base)
    strided = tensor(4, 128, 1, 64, strides=[16384, 128, 64, 1])
    return {
        "cache_mode": {"cache_mode": "TND"},
        "quant_combination": {"quant_scale_ckv": tensor(1, dtype="float32")},
        "token_rank": {"token_x": tensor(1, 2, 4, 7168)},
        "rope_rank": {"rope_sin": tensor(2, 4, 64)},
        "weight_uk_rank": {"weight_uk": tensor(4096, 512)},
        "weight_rank": {"weight_dq": tensor(1, 7168, 1536)},
        "gamma_rank": {"rmsnorm_gamma_cq": tensor(1, 1536)},
        "cache_rank": {"kv_cache": tensor(4, 128, 512)},
        "index_dtype": {"cache_index": tensor(8, dtype="int32")},
        "weight_dtype": retyped(base, "int8", "weight_dq"),
        "scales_given": eight | {"dequant_scale_x": None},
        "cache_scales_given": {
            **retyped(base, "int8", "weight_uq_qr", "kv_cache", "kr_cache"),
            "dequant_scale_w_uq_qr": tensor(1, 32 * 192, dtype="float32"),
            "quant_scale_ckv": tensor(1, 512, dtype="float32"),
        },
        "scale_dtype": eight | {"dequant_scale_x": tensor(8, 1)},
        "cache_dtype": retyped(base, "int8", "kv_cache"),
        "smooth_mxfp8": {"smooth_scales_cq": tensor(1, 1536, dtype="float32")},
        "shapes": {"weight_dkv_kr": tensor(7168, 512)},
        "cache_shape": {"kr_cache": tensor(4, 64, 1, 64)},
        "index_shape": {"cache_index": tensor(7, dtype="int64")},
        "nz_shape": {"cache_mode": "PA_NZ", "kr_cache": strided},
    }
