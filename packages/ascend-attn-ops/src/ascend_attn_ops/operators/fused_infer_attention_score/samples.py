"""Legal and illegal argument sets of fused_infer_attention_score."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...operator import Sample


def _tensor(*shape: int, dtype: str = "bfloat16") -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype}


def paged_tnd() -> dict[str, Any]:
    """Two requests (3 and 5 query rows, 20 and 40 keys) over a cache of blocks of 16."""
    return {
        "query": _tensor(8, 4, 128),
        "key": _tensor(6, 2, 16, 128),
        "value": _tensor(6, 2, 16, 128),
        "atten_mask": _tensor(2048, 2048, dtype="int8"),
        "actual_seq_lengths": [3, 8],
        "actual_seq_lengths_kv": [20, 40],
        "block_table": _tensor(2, 3, dtype="int32"),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": 16,
        "scale": 0.088,
    }


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    base = paged_tnd()
    yield Sample("paged_tnd", base, "A3")
    flat = {"key": _tensor(6, 16, 256), "value": _tensor(6, 16, 256)}
    yield Sample("paged_flat_heads", base | flat, "A2")
    yield Sample("window", base | {"sparse_mode": 4, "pre_tokens": 7, "next_tokens": 0}, "A5")
    float32 = {name: _tensor(*base[name]["shape"], dtype="float32") for name in _QKV}
    yield Sample("float32_without_product", base | float32)
    broken: dict[str, dict[str, Any]] = {
        "layout": {"input_layout": "XYZ"},
        "query_rank": {"query": _tensor(8, 512)},
        "heads": {"num_heads": 0},
        "kv_heads": {"num_key_value_heads": 3},
        "dtype": {"query": _tensor(8, 4, 128, dtype="int32")},
        "half": float32,
        "sparse_mode": {"sparse_mode": 5},
        "query_lengths_given": {"actual_seq_lengths": None},
        "kv_lengths_given": {"actual_seq_lengths_kv": None},
        "mask_given": {"atten_mask": None},
        "kv_dtype": {"key": _tensor(6, 2, 16, 128, dtype="float16")},
        "query_lengths": {"actual_seq_lengths": [3, 7]},
        "kv_lengths": {"actual_seq_lengths_kv": [20, 400]},
        "block_table": {"block_table": _tensor(3, 3, dtype="int32")},
        "block_size": {"block_size": 32},
        "block_size_limits": _blocks_of(24),
        "kv_shape": {"value": _tensor(5, 2, 16, 128)},
        "head_size": _head_size(96),
    }
    for rule, changes in broken.items():
        yield Sample(f"broken_{rule}", base | changes, "A3", (rule,))
    many = list(range(1, 4098))
    yield Sample(
        "broken_batch_limit",
        base
        | {
            "query": _tensor(4097, 4, 128),
            "actual_seq_lengths": many,
            "actual_seq_lengths_kv": [1] * 4097,
            "block_table": _tensor(4097, 3, dtype="int32"),
        },
        "A3",
        ("batch_limit",),
    )


_QKV = ("query", "key", "value")


def _blocks_of(size: int) -> dict[str, Any]:
    cache = _tensor(6, 2, size, 128)
    return {"key": cache, "value": cache, "block_size": size}


def _head_size(size: int) -> dict[str, Any]:
    cache = _tensor(6, 2, 16, size)
    return {"query": _tensor(8, 4, size), "key": cache, "value": cache}
