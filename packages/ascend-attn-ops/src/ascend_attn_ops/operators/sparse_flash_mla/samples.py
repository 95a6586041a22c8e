"""Legal and illegal argument sets of sparse_flash_mla."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, ints, retyped, tensor

_WINDOW: Data = {"ori_mask_mode": 4, "ori_win_left": 127, "ori_win_right": 0}
_PLAN: Data = {"metadata": tensor(1024, dtype="int32")}


def _heads(count: int) -> Data:
    return {"q": tensor(3, count, 512), "sinks": tensor(count, dtype="float32")}


def window_alone() -> Data:
    """One BSND request of 16 queries over 64 original keys, sliding window."""
    return {
        "q": tensor(1, 16, 64, 512),
        "ori_kv": tensor(1, 64, 1, 512),
        "sinks": tensor(64, dtype="float32"),
        "cmp_mask_mode": 0,
        **_WINDOW,
        **_PLAN,
    }


def sparse() -> Data:
    """Two TND requests over paged original and compressed keys with indices, ratio 4."""
    return {
        **_heads(64),
        "ori_kv": tensor(8, 128, 1, 512),
        "cmp_kv": tensor(6, 32, 1, 512),
        "cmp_sparse_indices": tensor(3, 1, 512, dtype="int32"),
        "ori_block_table": tensor(2, 2, dtype="int32"),
        "cmp_block_table": tensor(2, 2, dtype="int32"),
        "cu_seqlens_q": ints(0, 2, 3),
        "seqused_ori_kv": ints(130, 41),
        "seqused_cmp_kv": ints(32, 10),
        "cmp_residual_kv": ints(2, 1),
        "cmp_ratio": 4,
        "layout_q": "TND",
        "layout_kv": "PA_BBND",
        **_WINDOW,
        **_PLAN,
    }


def dense() -> Data:
    """All compressed keys, ratio 128, TND everywhere."""
    return {
        **_heads(128),
        "ori_kv": tensor(500, 1, 512),
        "cmp_kv": tensor(3, 1, 512),
        "cu_seqlens_q": ints(0, 2, 3),
        "cu_seqlens_ori_kv": ints(0, 300, 500),
        "cu_seqlens_cmp_kv": ints(0, 2, 3),
        "cmp_residual_kv": ints(44, 72),
        "cmp_ratio": 128,
        "layout_q": "TND",
        "layout_kv": "TND",
        **_WINDOW,
        **_PLAN,
    }


def samples() -> Iterator[Sample]:
    """Legal calls and, for every rule, a call that breaks it."""
    base, alone = sparse(), window_alone()
    for profile in ("A2", "A3", "A5"):
        yield Sample(f"window_{profile}", alone, profile)
        yield Sample(f"sparse_{profile}", base, profile)
        yield Sample(f"dense_{profile}", dense(), profile)
    apart = tensor(8, 128, 1, 512, strides=[70000, 512, 512, 1])
    yield Sample("blocks_apart", base | {"ori_kv": apart}, "A3")
    lengths = {"cmp_mask_mode": 0, "cmp_topk_length": tensor(3, 1, dtype="int32")}
    yield Sample("topk_length", base | lengths, "A5")
    yield Sample("float32_on_the_host", base | retyped(base, "float32", "q", "ori_kv", "cmp_kv"))
    for rule, changes in _broken().items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    for rule, changes in _broken_alone().items():
        yield Sample(f"broken_{rule}", alone | changes, None, (rule,))
    for rule, changes in _broken_on_product().items():
        yield Sample(f"broken_{rule}", base | changes, "A3", (rule,))
    four = dense() | {"cmp_ratio": 4, "cmp_residual_kv": ints(0, 0)}
    yield Sample("broken_cmp_ratio_a2_a3", four, "A3", ("cmp_ratio_a2_a3",))
    yield Sample("dense_ratio_4_A5", four, "A5")


def _broken() -> dict[str, Data]:
    return {
        "layout_q": {"layout_q": "BNSD"},
        "layout_kv": {"layout_kv": "PA_BSND"},
        "ori_mask_mode": {"ori_mask_mode": 1},
        "cmp_mask_mode": {"cmp_mask_mode": 4},
        "cmp_ratio": {"cmp_ratio": 129},
        "windows": {"ori_win_right": -2},
        "ranks": {"ori_kv": tensor(8, 1, 512)},
        "topk_value_mode": {"topk_value_mode": 2},
        "softmax_scale": {"softmax_scale": float("inf")},
        "dtype": {"q": tensor(3, 64, 512, dtype="int8")},
        "ori_kv_given": {"ori_kv": None},
        "ori_indices": {"ori_sparse_indices": tensor(3, 1, 512, dtype="int32")},
        "cu_seqlens": {"cu_seqlens_q": None},
        "block_tables": {"cmp_block_table": None},
        "seqused_given": {"seqused_ori_kv": None},
        "residual_given": {"cmp_residual_kv": None},
        "topk_length": {"cmp_topk_length": tensor(3, 1, dtype="int32")},
        "heads": _heads(129),
        "kv_heads": {"cmp_kv": tensor(6, 32, 2, 512)},
        "topk": {"cmp_sparse_indices": tensor(3, 1, 0, dtype="int32")},
        "block_size": {"ori_kv": tensor(8, 2048, 1, 512)},
        "same_dtype": {"cmp_kv": tensor(6, 32, 1, 512, dtype="float16")},
        "key_size": {"ori_kv": tensor(8, 128, 1, 576)},
        "lengths": {"seqused_q": ints(2, 1, dtype="int64")},
        "tables": {"ori_block_table": tensor(3, 2, dtype="int32")},
        "indices": {"cmp_sparse_indices": tensor(3, 2, 512, dtype="int32")},
        "topk_length_form": {
            "cmp_mask_mode": 0,
            "cmp_topk_length": tensor(3, dtype="int32"),
        },
        "sinks": {"sinks": tensor(64, dtype="bfloat16")},
        "metadata": {"metadata": tensor(1023, dtype="int32")},
    }


def _broken_alone() -> dict[str, Data]:
    return {
        "alone": {"cmp_mask_mode": 3},
        "indices_need_keys": {"cmp_sparse_indices": tensor(1, 16, 1, 512, dtype="int32")},
        "key_batch": {"ori_kv": tensor(2, 64, 1, 512)},
        "layouts": {
            "layout_kv": "TND",
            "ori_kv": tensor(64, 1, 512),
            "cu_seqlens_ori_kv": ints(0, 64),
        },
    }


def _broken_on_product() -> dict[str, Data]:
    small = {"q": tensor(3, 64, 128), "ori_kv": tensor(8, 128, 1, 128)}
    gaps = tensor(8, 128, 1, 512, strides=[131072, 1024, 1024, 1])
    return {
        "half": retyped(sparse(), "float32", "q", "ori_kv", "cmp_kv"),
        "sinks_given": {"sinks": None},
        "metadata_given": {"metadata": None},
        "windows_a2_a3": {"ori_win_left": 255},
        "heads_a2_a3": _heads(96),
        "head_size": small | {"cmp_kv": tensor(6, 32, 1, 128)},
        "topk_a2_a3": {"cmp_sparse_indices": tensor(3, 1, 2048, dtype="int32")},
        "block_size_a2_a3": {"cmp_kv": tensor(6, 40, 1, 512)},
        "cache_strides": {"ori_kv": gaps},
    }
