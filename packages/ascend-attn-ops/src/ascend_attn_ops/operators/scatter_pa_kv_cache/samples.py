"""Legal and illegal argument sets of scatter_pa_kv_cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...operator import Sample


def _tensor(*shape: int, dtype: str = "float16", **more: Any) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype, **more}


def _norm() -> dict[str, Any]:
    return {
        "key": _tensor(16, 4, 32),
        "value": _tensor(16, 4, 64),
        "key_cache": _tensor(2, 32, 4, 32),
        "value_cache": _tensor(2, 32, 4, 64),
        "slot_mapping": _tensor(16, dtype="int32", values=list(range(16))),
        "cache_mode": "Norm",
    }


def _nz() -> dict[str, Any]:
    caches = {"key_cache": _tensor(2, 8, 32, 16), "value_cache": _tensor(2, 16, 32, 16)}
    return _norm() | caches | {"cache_mode": "PA_NZ"}


def samples() -> Iterator[Sample]:
    """Vendor test shapes and, for every rule, a call that breaks it."""
    yield Sample("norm", _norm())
    yield Sample("nz", _nz())
    yield Sample("int64_slots", _norm() | {"slot_mapping": _tensor(16, dtype="int64")})
    yield Sample("no_mode_means_norm_caches", _norm() | {"cache_mode": "Norm"}, "A3")
    broken: dict[str, dict[str, Any]] = {
        "key_rank": {"key": _tensor(2, 8, 4, 32), "value": _tensor(2, 8, 4, 64)},
        "value_rank": {"value": _tensor(16, 256)},
        "slot_rank": {"slot_mapping": _tensor(16, 1, dtype="int32")},
        "slot_dtype": {"slot_mapping": _tensor(16, dtype="float32")},
        "cache_rank": {"key_cache": _tensor(2, 32, 128)},
        "cache_mode": {"cache_mode": "ND"},
        "dtype": {name: _tensor(*shape, dtype="float64") for name, shape in _SHAPES.items()},
        "same_dtype": {"key": _tensor(16, 4, 32, dtype="bfloat16")},
        "same_tokens": {"value": _tensor(16, 2, 64)},
        "slot_count": {"slot_mapping": _tensor(15, dtype="int32")},
        "cache_shape": {"cache_mode": "PA_NZ"},
        "compress_lengths": {"seq_lens": _tensor(2, dtype="int32")},
    }
    for rule, changes in broken.items():
        yield Sample(f"broken_{rule}", _norm() | changes, None, (rule,))
    strided = _tensor(16, 4, 32, strides=[256, 64, 1])
    yield Sample("broken_contiguous", _norm() | {"key": strided}, "A2", ("contiguous",))
    yield Sample("strided_without_product", _norm() | {"key": strided})


_SHAPES = {
    "key": (16, 4, 32),
    "value": (16, 4, 64),
    "key_cache": (2, 32, 4, 32),
    "value_cache": (2, 32, 4, 64),
}
