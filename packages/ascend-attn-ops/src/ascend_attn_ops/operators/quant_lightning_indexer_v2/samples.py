"""Legal and illegal argument sets of quant_lightning_indexer_v2."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, ints, retyped, tensor


def paged_tnd() -> Data:
    """Two requests of two query rows over a cache of blocks of 128, int8, with metadata."""
    return {
        "q": tensor(4, 64, 128, dtype="int8"),
        "k": tensor(32, 128, 1, 128, dtype="int8"),
        "w": tensor(4, 64, dtype="float16"),
        "q_descale": tensor(4, 64, dtype="float16"),
        "k_descale": tensor(32, 128, 1, dtype="float16"),
        "topk": 2048,
        "quant_mode": 2,
        "cu_seqlens_q": ints(0, 2, 4),
        "seqused_k": ints(1000, 2048),
        "block_table": tensor(2, 16, dtype="int32"),
        "metadata": tensor(1024, dtype="int32"),
        "layout_q": "TND",
        "layout_k": "PA_BBND",
        "mask_mode": 3,
    }


def whole_bsnd() -> Data:
    """Two requests of three query rows over 50 keys that are not paged, float8 (Ascend950)."""
    return {
        "q": tensor(2, 3, 16, 128, dtype="float8_e4m3fn"),
        "k": tensor(2, 50, 1, 128, dtype="float8_e4m3fn"),
        "w": tensor(2, 3, 16, dtype="float32"),
        "q_descale": tensor(2, 3, 16, dtype="float32"),
        "k_descale": tensor(2, 50, 1, dtype="float32"),
        "topk": 20,
        "quant_mode": 1,
        "metadata": tensor(1024, dtype="int32"),
        "return_value": 1,
    }


def _mxfp8() -> Data:
    return whole_bsnd() | {
        "q_descale": tensor(2, 3, 16, 2, 2, dtype="float8_e8m0fnu"),
        "k_descale": tensor(2, 50, 1, 2, 2, dtype="float8_e8m0fnu"),
        "quant_mode": 3,
    }


def _compressed() -> Data:
    return paged_tnd() | {"cmp_ratio": 4, "cmp_residual_k": ints(3, 0)}


def _legal() -> Iterator[Sample]:
    for profile in (None, "A2", "A3", "A5"):
        yield Sample(f"paged_tnd_{profile}", paged_tnd(), profile)
        yield Sample(f"compressed_{profile}", _compressed(), profile)
    yield Sample("whole_bsnd", whole_bsnd(), "A5")
    yield Sample("mxfp8", _mxfp8(), "A5")
    hifloat8 = whole_bsnd() | retyped(whole_bsnd(), "uint8", "q", "k") | {"quant_mode": 4}
    scales = {name: tensor(1, dtype="float32") for name in ("q_descale", "k_descale")}
    yield Sample("hifloat8", hifloat8 | scales, "A5")
    yield Sample("candidate_source", paged_tnd() | {"candidate_mode": 1}, "A3")


def _broken_anywhere() -> dict[str, Data]:
    base = paged_tnd()
    return {
        "layout_q": {"layout_q": "BNSD"},
        "layout_k": {"layout_k": "PA_BSND"},
        "ranks": {"q": tensor(4, 8192, dtype="int8")},
        "mask_mode": {"mask_mode": 4},
        "quant_mode": {"quant_mode": 6},
        "dtypes": retyped(base, "float32", "w"),
        "not_empty": {"k": tensor(0, 128, 1, 128, dtype="int8")},
        "max_seqlen_q": {"max_seqlen_q": -2},
        "return_value": {"return_value": 2},
        "topk": {"topk": 8193},
        "cmp_ratio": {"cmp_ratio": 129},
        "cu_seqlens": {"cu_seqlens_q": None},
        "block_table_given": {"block_table": None},
        "seqused_k_given": {"seqused_k": None},
        "cmp_residual_k_given": {"cmp_ratio": 4},
        "candidate_mode": {"candidate_mode": 0},
        "candidate_index": {"candidate_mode": 2},
        "candidate_blocks": {"candidate_topk_blocks": 100},
        "candidate_block_size": {"candidate_block_size": 16},
        "kv_heads": {"k": tensor(32, 128, 2, 128, dtype="int8")},
        "head_size": {"q": tensor(4, 64, 64, dtype="int8")},
        "block_size": {"k": tensor(32, 40, 1, 128, dtype="int8")},
        "batch": {"cu_seqlens_q": ints(0)},
        "shapes": {"w": tensor(4, 32, dtype="float16")},
        "block_table": {"block_table": tensor(3, 16, dtype="int32")},
        "int32": {"seqused_k": tensor(2, dtype="int64")},
    }


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    yield from _legal()
    base, whole = paged_tnd(), whole_bsnd()
    for rule, changes in _broken_anywhere().items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    unequal = whole | {"layout_k": "TND", "cu_seqlens_k": ints(0, 50, 100)}
    unequal |= {"k": tensor(100, 1, 128, dtype="float8_e4m3fn")}
    unequal |= {"k_descale": tensor(100, 1, dtype="float32")}
    yield Sample("broken_layouts", unequal, None, ("layouts",))
    on_product: dict[str, tuple[str, Data]] = {
        "quant_mode_a2_a3": ("A3", {"quant_mode": 1}),
        "topk_a2_a3": ("A2", {"topk": 4096}),
        "cmp_ratio_a2_a3": ("A3", {"cmp_ratio": 3, "cmp_residual_k": ints(0, 0)}),
        "metadata_a5": ("A5", {"metadata": None}),
        "seqused_q_a2_a3": ("A3", {"seqused_q": ints(1, 2)}),
        "a5_only": ("A3", {"return_value": 1}),
        "candidate_a5": ("A5", {"candidate_mode": 1}),
        "heads_a2_a3": ("A3", _heads(32)),
        "heads_a5": ("A5", _heads(65)),
    }
    for rule, (profile, changes) in on_product.items():
        yield Sample(f"broken_{rule}", base | changes, profile, (rule,))
    contiguous = whole | retyped(whole, "int8", "q", "k") | {"quant_mode": 2, "return_value": 0}
    contiguous |= retyped(whole, "float16", "w", "q_descale", "k_descale")
    yield Sample("broken_layout_k_a2_a3", contiguous, "A3", ("layout_k_a2_a3",))


def _heads(count: int) -> Data:
    rows = {"q": tensor(4, count, 128, dtype="int8")}
    return rows | {name: tensor(4, count, dtype="float16") for name in ("w", "q_descale")}
