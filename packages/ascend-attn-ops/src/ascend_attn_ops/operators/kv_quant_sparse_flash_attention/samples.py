"""Legal and illegal argument sets of kv_quant_sparse_flash_attention."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, ints, tensor


def _packed(*rows: int, size: int = 656, dtype: str = "int8") -> Data:
    packed = tensor(*rows, size, dtype=dtype)
    return {"key": packed, "value": packed}


def paged_tnd() -> Data:
    """Two requests of two query rows over a packed cache of blocks of 128."""
    return {
        "query": tensor(4, 64, 576),
        **_packed(32, 128, 1),
        "sparse_indices": tensor(4, 1, 2048, dtype="int32"),
        "scale_value": 0.0417,
        "key_quant_mode": 2,
        "value_quant_mode": 2,
        "block_table": tensor(2, 16, dtype="int32"),
        "actual_seq_lengths_query": ints(2, 4),
        "actual_seq_lengths_kv": ints(1000, 2048),
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "attention_mode": 2,
    }


def whole_bsnd() -> Data:
    """One request of two query rows over 128 packed rows that are not paged."""
    return {
        "query": tensor(1, 2, 16, 576, dtype="float16"),
        **_packed(1, 128, 1),
        "sparse_indices": tensor(1, 2, 1, 64, dtype="int32"),
        "scale_value": 0.0417,
        "key_quant_mode": 2,
        "value_quant_mode": 2,
        "attention_mode": 2,
    }


def _legal() -> Iterator[Sample]:
    base = paged_tnd()
    for profile in (None, "A2", "A3", "A5"):
        yield Sample(f"paged_tnd_{profile}", base, profile)
        yield Sample(f"whole_bsnd_{profile}", whole_bsnd(), profile)
    yield Sample("blocks_of_16_keys", base | {"sparse_block_size": 16}, "A3")
    yield Sample("float8", base | _packed(32, 128, 1, dtype="float8_e4m3fn"), "A5")
    yield Sample("hifloat8", base | _hifloat8(), "A5")
    yield Sample("heads_48", base | {"query": tensor(4, 48, 576)}, "A5")
    yield Sample("blocks_apart", base | _apart(), "A5")


def _hifloat8() -> Data:
    """Bytes of hifloat8; 290 stands for torch_npu.hifloat8, whose number is (unverified)."""
    return _packed(32, 128, 1, dtype="uint8") | {"key_dtype": 290, "value_dtype": 290}


def _apart() -> Data:
    key = tensor(32, 128, 1, 656, dtype="int8", strides=[167936, 656, 656, 1])
    return {"key": key, "value": key}


def _broken_anywhere() -> dict[str, Data]:
    fewer = {"sparse_indices": tensor(4, 1, 1024, dtype="int32")}
    return {
        "layout_query": {"layout_query": "BNSD"},
        "layout_kv": {"layout_kv": "PA_NZ"},
        "query_rank": {"query": tensor(4, 576)},
        "key_rank": {"key": tensor(32, 128, 656, dtype="int8")},
        "sparse_mode": {"sparse_mode": 1},
        "tokens": {"next_tokens": 0},
        "block_table_given": {"block_table": None},
        "query_lengths_given": {"actual_seq_lengths_query": None},
        "kv_lengths_given": {"actual_seq_lengths_kv": None},
        "kv_heads": _packed(32, 128, 2),
        "block_size": _packed(32, 24, 1),
        "block_table": {"block_table": tensor(2, 16, dtype="int64")},
        "kv_lengths": {"actual_seq_lengths_kv": ints(1000)},
        "indices_rank": {"sparse_indices": tensor(4, 2048, dtype="int32")},
        "indices_dtype": {"sparse_indices": tensor(4, 1, 2048, dtype="int64")},
        "indices_shape": {"sparse_indices": tensor(3, 1, 2048, dtype="int32")},
        "sparse_block_size": {"sparse_block_size": 32},
        "sparse_block_divides": {"sparse_block_size": 16, **_packed(32, 24, 1)},
        "attention_mode": {"attention_mode": 0},
        "dtype": {"query": tensor(4, 64, 576, dtype="float32")},
        "kv_dtype": _packed(32, 128, 1, dtype="int16"),
        "not_empty": {"sparse_indices": tensor(4, 1, 0, dtype="int32")},
        "quant_modes": {"key_quant_mode": 1},
        "packing": {"tile_size": 64},
        "no_scales": {"key_dequant_scale": tensor(4, dtype="float32")},
        "query_size": {"query": tensor(4, 64, 512)},
        "row_size": _packed(32, 128, 1, size=640),
        "hifloat8_count": _hifloat8() | fewer,
        "same_dtype": {"value": tensor(32, 128, 1, 656, dtype="float8_e4m3fn")},
        "value_shape": {"value": tensor(16, 128, 1, 656, dtype="int8")},
    }


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    yield from _legal()
    base, whole = paged_tnd(), whole_bsnd()
    for rule, changes in _broken_anywhere().items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    lengths = {"actual_seq_lengths_query": tensor(2, dtype="int32")}
    yield Sample("broken_query_lengths", whole | lengths, None, ("query_lengths",))
    yield Sample("broken_key_batch", whole | _packed(2, 128, 1), None, ("key_batch",))
    unequal = base | _packed(3000, 1) | {"layout_kv": "TND", "block_table": None}
    unequal |= {"layout_query": "BSND", "query": tensor(2, 2, 64, 576)}
    unequal |= {"sparse_indices": tensor(2, 2, 1, 2048, dtype="int32")}
    yield Sample("broken_layouts", unequal, None, ("layouts",))
    on_product: dict[str, tuple[str, Data]] = {
        "sparse_block_size_one": ("A5", {"sparse_block_size": 16}),
        "kv_dtype_a2_a3": ("A3", _packed(32, 128, 1, dtype="float8_e4m3fn")),
        "heads_a2_a3": ("A3", {"query": tensor(4, 48, 576)}),
        "heads_a5": ("A5", {"query": tensor(4, 24, 576)}),
        "cache_strides": ("A2", _apart()),
    }
    for rule, (profile, changes) in on_product.items():
        yield Sample(f"broken_{rule}", base | changes, profile, (rule,))
