"""Legal and illegal argument sets of flash_attn_metadata."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...operator import Sample


def _lengths(*values: int, dtype: str = "int32") -> dict[str, Any]:
    return {"shape": [len(values)], "dtype": dtype, "values": list(values)}


def dense() -> dict[str, Any]:
    """Two requests of 64 queries and 256 keys in BSND, 8 heads over 2."""
    return {
        "num_heads_q": 8,
        "num_heads_kv": 2,
        "head_dim": 128,
        "batch_size": 2,
        "max_seqlen_q": 64,
        "max_seqlen_kv": 256,
        "mask_mode": 0,
    }


def packed() -> dict[str, Any]:
    """Two requests of TND queries over a paged cache, causal."""
    return {
        "num_heads_q": 8,
        "num_heads_kv": 2,
        "head_dim": 128,
        "cu_seqlens_q": _lengths(0, 3, 8),
        "seqused_kv": _lengths(20, 40),
        "max_seqlen_q": 5,
        "max_seqlen_kv": 40,
        "mask_mode": 3,
        "layout_q": "TND",
        "layout_kv": "PA_BBND",
        "layout_out": "TND",
    }


def samples() -> Iterator[Sample]:
    """Legal calls and, for every rule, a call that breaks it."""
    yield Sample("dense", dense(), "A5")
    yield Sample("packed", packed(), "A5")
    yield Sample("window", packed() | {"mask_mode": 4, "win_left": 7, "win_right": 0}, "A5")
    host = {name: value for name, value in dense().items() if name != "mask_mode"}
    yield Sample("no_mask_mode_on_the_host", host | {"head_dim": 32})
    yield Sample("broken_mask_mode_given", host, "A5", ("mask_mode_given",))
    yield Sample("unknown_longest", packed() | {"max_seqlen_q": -1, "max_seqlen_kv": None}, "A5")
    broken: dict[str, dict[str, Any]] = {
        "layout_q": {"layout_q": "SBH"},
        "layout_kv": {"layout_kv": "NZ"},
        "layout_out": {"layout_out": "NTD"},
        "mask_mode": {"mask_mode": 2},
        "windows": {"mask_mode": 4, "win_left": -2},
        "max_seqlen": {"max_seqlen_q": -2},
        "heads": {"num_heads_q": 6, "num_heads_kv": 4},
        "head_dim_positive": {"head_dim": 0},
        "head_dim": {"head_dim": 96},
        "batch_size": {"batch_size": 65536},
        "length_tensors": {"seqused_q": _lengths(3, 4, dtype="int64")},
        "batch_given": {"batch_size": None},
        "windows_unused": {"mask_mode": 3, "win_right": 0},
        "lengths_known": {"max_seqlen_kv": -1},
        "layout_table": {"layout_out": "BNSD"},
        "batch_agrees": {"seqused_kv": _lengths(5, 6, 7)},
    }
    for rule, changes in broken.items():
        yield Sample(f"broken_{rule}", dense() | changes, "A5", (rule,))
    yield Sample(
        "broken_prefix_sums_given",
        packed() | {"layout_kv": "TND"},
        "A5",
        ("prefix_sums_given",),
    )
    yield Sample("broken_paged_lengths", packed() | {"seqused_kv": None}, "A5", ("paged_lengths",))
    one = {"cu_seqlens_q": _lengths(0)}
    yield Sample("broken_one_prefix_sum", packed() | one, "A5", ("length_tensors",))
