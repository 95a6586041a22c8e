"""Legal and illegal argument sets of kv_rmsnorm_rope_cache, shared with version 2."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, retyped, tensor


def paged() -> Data:
    """Two requests of three tokens into six blocks of 128."""
    return {
        "kv": tensor(2, 1, 3, 576),
        "gamma": tensor(512),
        "cos": tensor(2, 1, 3, 64),
        "sin": tensor(2, 1, 3, 64),
        "index": tensor(6, dtype="int64"),
        "k_cache": tensor(6, 128, 1, 64),
        "ckv_cache": tensor(6, 128, 1, 512),
        "cache_mode": "PA",
    }


def _norm() -> Data:
    caches = {"k_cache": tensor(2, 1, 16, 64), "ckv_cache": tensor(2, 1, 16, 512)}
    return paged() | caches | {"cache_mode": "Norm", "index": tensor(2, 3, dtype="int64")}


def _quantised() -> Data:
    scales = {
        "k_rope_scale": tensor(64, dtype="float32"),
        "c_kv_scale": tensor(512, dtype="float32"),
    }
    return paged() | retyped(paged(), "int8", "k_cache", "ckv_cache") | scales


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    base = paged()
    yield Sample("paged", base, "A2")
    yield Sample("norm", _norm(), "A3")
    yield Sample("nz", base | {"cache_mode": "PA_NZ", "is_output_kv": True}, "A3")
    by_page = {"cache_mode": "PA_BLK_BNSD", "index": tensor(2, dtype="int64")}
    yield Sample("by_page", base | by_page, "A2")
    yield Sample("quantised", _quantised(), "A2")
    yield Sample("apart_values", base | {"v": tensor(2, 1, 3, 128)}, "A2")
    for rule, changes in _broken(base).items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    for rule, changes in _broken_on_npu(base).items():
        yield Sample(f"broken_{rule}", base | changes, "A2", (rule,))
        yield Sample(f"{rule}_without_product", base | changes)


def _broken(base: Data) -> dict[str, Data]:
    return {
        "cache_mode": {"cache_mode": "PA_BSND"},
        "offsets": {"c_kv_offset": tensor(512, dtype="float32")},
        "rank": {"kv": tensor(2, 3, 576)},
        "gamma_rank": {"gamma": tensor(1, 512)},
        "index_rank": {"index": tensor(2, 3, dtype="int64")},
        "index_dtype": {"index": tensor(6, dtype="int32")},
        "dtype": {"kv": tensor(2, 1, 3, 576, dtype="int8")},
        "scale_pair": {"k_rope_scale": tensor(64, dtype="float32")},
        "same_dtype": {"gamma": tensor(512, dtype="float16")},
        "cache_dtype": retyped(base, "int8", "k_cache", "ckv_cache"),
        "scales": _quantised() | {"c_kv_scale": tensor(64, dtype="float32")},
        "hidden": {"kv": tensor(2, 1, 3, 640)},
        "values": {"v": tensor(2, 1, 4, 128)},
        "rotary_shape": {"sin": tensor(2, 1, 4, 64)},
        "cache_shape": {"ckv_cache": tensor(6, 64, 1, 512)},
        "nz_shape": {
            "cache_mode": "PA_NZ",
            "k_cache": tensor(6, 128, 1, 64, strides=[16384, 128, 64, 1]),
        },
        "index_count": {"index": tensor(5, dtype="int64")},
    }


def _broken_on_npu(base: Data) -> dict[str, Data]:
    floats = ("kv", "gamma", "cos", "sin", "k_cache", "ckv_cache")
    few = {"k_cache": tensor(1, 128, 1, 64), "ckv_cache": tensor(1, 128, 1, 512)}
    small = {
        "kv": tensor(2, 1, 3, 320),
        "gamma": tensor(256),
        "ckv_cache": tensor(6, 128, 1, 256),
    }
    return {
        "half": retyped(base, "float32", *floats),
        "sizes": small,
        "block_count": few,
        "contiguous": {"kv": tensor(2, 1, 3, 576, strides=[4608, 4608, 1152, 1])},
    }
