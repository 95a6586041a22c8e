"""Legal and illegal argument sets of flash_attn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...operator import Sample

_PLAN = {"shape": [4096], "dtype": "int32"}
_TEMPLATE = {"shape": [2048, 2048], "dtype": "int8"}


def _tensor(*shape: int, dtype: str = "float16", **more: Any) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype, **more}


def _lengths(*values: int, dtype: str = "int32") -> dict[str, Any]:
    return {"shape": [len(values)], "dtype": dtype, "values": list(values)}


def dense() -> dict[str, Any]:
    """Two requests in BSND, 4 heads over 2, no mask."""
    keys = _tensor(2, 256, 2, 128)
    return {"q": _tensor(2, 64, 4, 128), "k": keys, "v": keys, "metadata": _PLAN}


def paged() -> dict[str, Any]:
    """Two requests (3 and 5 query rows, 20 and 40 keys) of TND queries, causal, PA_BBND."""
    cache = _tensor(6, 16, 2, 128)
    return {
        "q": _tensor(8, 4, 128),
        "k": cache,
        "v": cache,
        "block_table": _tensor(2, 3, dtype="int32"),
        "cu_seqlens_q": _lengths(0, 3, 8),
        "seqused_kv": _lengths(20, 40),
        "attn_mask": _TEMPLATE,
        "metadata": _PLAN,
        "softmax_scale": 0.088,
        "mask_mode": 3,
        "max_seqlen_q": 5,
        "max_seqlen_kv": 40,
        "layout_q": "TND",
        "layout_kv": "PA_BBND",
        "layout_out": "TND",
        "return_softmax_lse": True,
    }


def _cache(*shape: int, strides: list[int] | None = None) -> dict[str, Any]:
    more: dict[str, Any] = {} if strides is None else {"strides": strides}
    return {"k": _tensor(*shape, **more), "v": _tensor(*shape, **more)}


def _legal() -> Iterator[Sample]:
    yield Sample("dense", dense(), "A5")
    yield Sample("paged", paged(), "A5")
    window = {"mask_mode": 4, "win_left": 7, "win_right": 0}
    yield Sample("window", paged() | window, "A5")
    yield Sample("paged_heads_first", paged() | _cache(6, 2, 16, 128) | _layout("PA_BNBD"), "A5")
    yield Sample("paged_nz", paged() | _cache(6, 2, 8, 16, 16) | _layout("PA_NZ"), "A5")
    strided = _cache(6, 16, 2, 128, strides=[16 * 256 + 64, 256, 128, 1])
    yield Sample("strided_blocks", paged() | strided, "A5")
    yield Sample("empty_sinks", dense() | {"sinks": _tensor(0, dtype="float32")}, "A5")
    single = {name: _tensor(*dense()[name]["shape"], dtype="float32") for name in "qkv"}
    yield Sample("float32_on_the_host", dense() | single)
    yield Sample("sinks_on_the_host", dense() | {"sinks": _tensor(4, dtype="float32")})


def _layout(kv: str) -> dict[str, Any]:
    return {"layout_kv": kv}


def samples() -> Iterator[Sample]:
    """Legal calls and, for every rule, a call that breaks it."""
    yield from _legal()
    float32 = {name: _tensor(*dense()[name]["shape"], dtype="float32") for name in "qkv"}
    small = {"q": _tensor(2, 64, 4, 96)} | _cache(2, 256, 2, 96)
    dense_broken: dict[str, dict[str, Any]] = {
        "layout_q": {"layout_q": "BSH"},
        "layout_out": {"layout_out": "NTD"},
        "ranks": {"q": _tensor(128, 4, 128)},
        "dtype": {"q": _tensor(2, 64, 4, 128, dtype="int8")},
        "half": float32,
        "mask_mode": {"mask_mode": 2, "attn_mask": _TEMPLATE},
        "windows": {"win_left": -2},
        "max_seqlen": {"max_seqlen_kv": -5},
        "mask_tensor": {"mask_mode": 3, "attn_mask": _tensor(2048, 2048, dtype="uint8")},
        "length_tensors": {"seqused_q": _lengths(3, 4, dtype="int64")},
        "metadata": {"metadata": _tensor(0, dtype="int32")},
        "sinks_supported": {"sinks": _tensor(4, dtype="float32")},
        "metadata_given": {"metadata": None},
        "mask_given": {"mask_mode": 3},
        "windows_unused": {"win_right": 0},
        "prefix_sums_given": {"cu_seqlens_q": _lengths(0, 64, 128)},
        "head_size": small,
        "not_empty": _cache(2, 0, 2, 128),
        "kv_strides": _cache(2, 256, 2, 128, strides=[256 * 512, 512, 128, 1]),
        "layout_table": _cache(2, 2, 256, 128) | _layout("BNSD"),
        "same_dtype": {"k": _tensor(2, 256, 2, 128, dtype="bfloat16")},
        "kv_shape": {"v": _tensor(2, 255, 2, 128)},
        "heads": _cache(2, 256, 3, 128),
        "batch_agrees": _cache(3, 256, 2, 128),
    }
    for rule, changes in dense_broken.items():
        yield Sample(f"broken_{rule}", dense() | changes, "A5", (rule,))
    paged_broken: dict[str, dict[str, Any]] = {
        "layout_kv": _layout("PA_BSND"),
        "block_table": {"block_table": _tensor(2, 3, dtype="int64")},
        "paged_arguments": {"seqused_kv": None},
        "block_size": _cache(6, 24, 2, 128),
        "nz_inner": _cache(6, 2, 4, 16, 32) | _layout("PA_NZ"),
    }
    for rule, changes in paged_broken.items():
        yield Sample(f"broken_{rule}", paged() | changes, "A5", (rule,))
    many = _cache(65536, 1, 2, 128) | {"q": _tensor(65536, 1, 4, 128)}
    yield Sample("broken_batch_limit", dense() | many, "A5", ("batch_limit",))
    wrong = dense() | {"sinks": _tensor(3, dtype="float32")}
    yield Sample("broken_sinks_shape", wrong, None, ("sinks_shape",))
