"""Legal and illegal argument sets of sparse_flash_mla_metadata."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, ints, tensor


def window_alone() -> Data:
    """One request of 16 queries over 64 original keys, BSND, sliding window."""
    return {
        "num_heads_q": 64,
        "num_heads_kv": 1,
        "head_dim": 512,
        "batch_size": 1,
        "max_seqlen_q": 16,
        "max_seqlen_ori_kv": 64,
        "ori_mask_mode": 4,
        "ori_win_left": 127,
        "ori_win_right": 0,
        "has_cmp_kv": False,
    }


def sparse() -> Data:
    """Two TND requests over paged original and compressed keys with indices, ratio 4."""
    return {
        "num_heads_q": 64,
        "num_heads_kv": 1,
        "head_dim": 512,
        "cu_seqlens_q": ints(0, 2, 3),
        "seqused_ori_kv": ints(130, 41),
        "seqused_cmp_kv": ints(32, 10),
        "cmp_residual_kv": ints(2, 1),
        "max_seqlen_q": 2,
        "cmp_topk": 512,
        "cmp_ratio": 4,
        "ori_mask_mode": 4,
        "cmp_mask_mode": 3,
        "ori_win_left": 127,
        "ori_win_right": 0,
        "layout_q": "TND",
        "layout_kv": "PA_BBND",
    }


def dense() -> Data:
    """All compressed keys, ratio 128, TND everywhere."""
    return {
        "num_heads_q": 128,
        "num_heads_kv": 1,
        "head_dim": 512,
        "cu_seqlens_q": ints(0, 2, 3),
        "cu_seqlens_ori_kv": ints(0, 300, 500),
        "cu_seqlens_cmp_kv": ints(0, 2, 3),
        "cmp_residual_kv": ints(44, 72),
        "max_seqlen_q": 2,
        "cmp_ratio": 128,
        "ori_mask_mode": 4,
        "cmp_mask_mode": 3,
        "ori_win_left": 127,
        "ori_win_right": 0,
        "layout_q": "TND",
        "layout_kv": "TND",
    }


def samples() -> Iterator[Sample]:
    """Legal calls and, for every rule, a call that breaks it."""
    for profile in ("A2", "A3", "A5"):
        yield Sample(f"window_{profile}", window_alone(), profile)
        yield Sample(f"sparse_{profile}", sparse(), profile)
        yield Sample(f"dense_{profile}", dense(), profile)
    lengths = {"cmp_mask_mode": 0, "cmp_topk_length": tensor(3, 1, dtype="int32")}
    yield Sample("topk_length", sparse() | lengths, "A5")
    yield Sample("small_heads_on_the_host", window_alone() | {"head_dim": 32})
    base, alone = sparse(), window_alone()
    for rule, changes in _broken().items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    for rule, changes in _broken_alone().items():
        yield Sample(f"broken_{rule}", alone | changes, None, (rule,))
    for rule, changes in _broken_on_product().items():
        yield Sample(f"broken_{rule}", base | changes, "A3", (rule,))
    dense_four = dense() | {"cmp_ratio": 4, "cmp_residual_kv": ints(0, 0)}
    yield Sample("broken_cmp_ratio_a2_a3", dense_four, "A3", ("cmp_ratio_a2_a3",))
    yield Sample("dense_ratio_4_A5", dense_four, "A5")


def _broken() -> dict[str, Data]:
    return {
        "layout_q": {"layout_q": "BNSD"},
        "layout_kv": {"layout_kv": "PA_BSND"},
        "ori_mask_mode": {"ori_mask_mode": 1},
        "cmp_mask_mode": {"cmp_mask_mode": 4},
        "cmp_ratio": {"cmp_ratio": 0},
        "windows": {"ori_win_left": -2},
        "heads": {"num_heads_q": 129},
        "kv_heads": {"num_heads_kv": 2},
        "has_ori_kv": {"has_ori_kv": False},
        "ori_topk": {"ori_topk": 512},
        "cmp_topk": {"cmp_topk": -1},
        "max_seqlen": {"max_seqlen_q": -1},
        "length_tensors": {"seqused_ori_kv": ints(130, 41, dtype="int64")},
        "cu_seqlens": {"cu_seqlens_q": None},
        "seqused_given": {"seqused_cmp_kv": None},
        "max_seqlen_q": {"max_seqlen_q": 0},
        "residual_given": {"cmp_residual_kv": None},
        "topk_length": {"cmp_topk_length": tensor(3, 1, dtype="int32")},
        "batch_agrees": {"seqused_ori_kv": ints(130, 41, 5)},
        "topk_length_form": {
            "cmp_mask_mode": 0,
            "cmp_topk_length": tensor(3, dtype="int32"),
        },
    }


def _broken_alone() -> dict[str, Data]:
    return {
        "batch_given": {"batch_size": 0},
        "alone": {"cmp_ratio": 4},
        "layouts": {"layout_kv": "TND", "cu_seqlens_ori_kv": ints(0, 64)},
    }


def _broken_on_product() -> dict[str, Data]:
    return {
        "windows_a2_a3": {"ori_win_left": 255},
        "heads_a2_a3": {"num_heads_q": 96},
        "head_size": {"head_dim": 576},
        "topk_a2_a3": {"cmp_topk": 2048},
    }
