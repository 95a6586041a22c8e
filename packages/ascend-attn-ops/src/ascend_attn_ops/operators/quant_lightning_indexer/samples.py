"""Legal and illegal argument sets of quant_lightning_indexer."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, ints, retyped, tensor


def paged_tnd() -> Data:
    """Two requests of two query rows over a cache of blocks of 128, int8."""
    return {
        "query": tensor(4, 64, 128, dtype="int8"),
        "key": tensor(32, 128, 1, 128, dtype="int8"),
        "weights": tensor(4, 64, dtype="float16"),
        "query_dequant_scale": tensor(4, 64, dtype="float16"),
        "key_dequant_scale": tensor(32, 128, 1, dtype="float16"),
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "actual_seq_lengths_query": ints(2, 4),
        "actual_seq_lengths_key": ints(1000, 2048),
        "block_table": tensor(2, 16, dtype="int32"),
        "layout_query": "TND",
        "layout_key": "PA_BSND",
    }


def whole_bsnd() -> Data:
    """Two requests of three query rows over 50 keys that are not paged, int8."""
    return {
        "query": tensor(2, 3, 16, 128, dtype="int8"),
        "key": tensor(2, 50, 1, 128, dtype="int8"),
        "weights": tensor(2, 3, 16, dtype="float16"),
        "query_dequant_scale": tensor(2, 3, 16, dtype="float16"),
        "key_dequant_scale": tensor(2, 50, 1, dtype="float16"),
        "query_quant_mode": 0,
        "key_quant_mode": 0,
    }


def _float8(scales: str, weights: str) -> Data:
    base = paged_tnd()
    changes = retyped(base, "float8_e4m3fn", "query", "key") | retyped(base, weights, "weights")
    return changes | retyped(base, scales, "query_dequant_scale", "key_dequant_scale")


def _hifloat8() -> Data:
    """Bytes of hifloat8; 290 stands for torch_npu.hifloat8, whose number is (unverified)."""
    changes = _float8("float32", "bfloat16") | retyped(paged_tnd(), "uint8", "query", "key")
    return changes | {"query_dtype": 290, "key_dtype": 290}


def _heads(count: int) -> Data:
    rows = {"query": tensor(4, count, 128, dtype="int8")}
    return rows | {n: tensor(4, count, dtype="float16") for n in ("weights", "query_dequant_scale")}


def _apart() -> Data:
    return {"key": tensor(32, 128, 1, 128, dtype="int8", strides=[32768, 128, 128, 1])}


def _legal() -> Iterator[Sample]:
    base = paged_tnd()
    for profile in (None, "A3", "A5"):
        yield Sample(f"paged_tnd_{profile}", base, profile)
        yield Sample(f"whole_bsnd_{profile}", whole_bsnd(), profile)
    yield Sample("float8_wide_scales", base | _float8("float32", "bfloat16"), "A5")
    yield Sample("float8_half_scales", base | _float8("float16", "float16"), "A5")
    yield Sample("hifloat8", base | _hifloat8(), "A5")
    yield Sample("blocks_apart", base | _apart(), "A3")


def _broken_anywhere() -> dict[str, Data]:
    base = paged_tnd()
    return {
        "layout_query": {"layout_query": "BNSD"},
        "layout_kv": {"layout_key": "PA_BBND"},
        "query_rank": {"query": tensor(4, 8192, dtype="int8")},
        "key_rank": {"key": tensor(32, 128, 128, dtype="int8")},
        "sparse_mode": {"sparse_mode": 4},
        "tokens": {"pre_tokens": 5},
        "block_table_given": {"block_table": None},
        "query_lengths_given": {"actual_seq_lengths_query": None},
        "kv_lengths_given": {"actual_seq_lengths_key": None},
        "kv_heads": {"key": tensor(32, 128, 2, 128, dtype="int8")},
        "block_size": {"key": tensor(32, 40, 1, 128, dtype="int8")},
        "block_table": {"block_table": tensor(3, 16, dtype="int32")},
        "kv_lengths": {"actual_seq_lengths_key": tensor(2, dtype="int64")},
        "not_empty": {"key": tensor(0, 128, 1, 128, dtype="int8")},
        "dtype": retyped(base, "float16", "query"),
        "scale_dtypes": retyped(base, "float64", "query_dequant_scale"),
        "quant_modes": {"query_quant_mode": 1},
        "sparse_count": {"sparse_count": 3072},
        "key_dtype": retyped(base, "float8_e4m3fn", "key"),
        "key_size": {"key": tensor(32, 128, 1, 64, dtype="int8")},
        "weights_shape": {"weights": tensor(4, 32, dtype="float16")},
        "scale_shapes": {"key_dequant_scale": tensor(32, 64, 1, dtype="float16")},
    }


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    yield from _legal()
    base, whole = paged_tnd(), whole_bsnd()
    for rule, changes in _broken_anywhere().items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    lengths = {"actual_seq_lengths_query": tensor(3, dtype="int32")}
    yield Sample("broken_query_lengths", whole | lengths, None, ("query_lengths",))
    more = {"key": tensor(3, 50, 1, 128, dtype="int8")}
    yield Sample("broken_key_batch", whole | more, None, ("key_batch",))
    unequal = whole | {"layout_key": "TND", "actual_seq_lengths_key": ints(50, 100)}
    unequal |= {"key": tensor(100, 1, 128, dtype="int8")}
    yield Sample("broken_layouts", unequal, None, ("layouts",))
    on_product: dict[str, tuple[str, Data]] = {
        "heads": ("A3", _heads(65)),
        "heads_a5": ("A5", _heads(12)),
        "head_size": ("A3", {n: tensor(*_half(n), dtype="int8") for n in ("query", "key")}),
        "combination_a2_a3": ("A3", _float8("float32", "bfloat16")),
        "combination_a5": ("A5", retyped(base, "float32", "query_dequant_scale")),
        "cache_strides": ("A2", _apart()),
    }
    for rule, (profile, changes) in on_product.items():
        yield Sample(f"broken_{rule}", base | changes, profile, (rule,))


def _half(name: str) -> tuple[int, ...]:
    return (*paged_tnd()[name]["shape"][:-1], 64)
