"""Legal and illegal argument sets of sparse_flash_attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...operator import Sample

Data = dict[str, Any]


def _tensor(*shape: int, dtype: str = "bfloat16", **more: Any) -> Data:
    return {"shape": list(shape), "dtype": dtype, **more}


def _latent(name: str, *rows: int, dtype: str = "bfloat16") -> Data:
    """A tensor of 512 elements per row and its rotary part of 64."""
    pair = {name: _tensor(*rows, 512, dtype=dtype)}
    return pair | {f"{name}_rope": _tensor(*rows, 64, dtype=dtype)}


def _keys(*rows: int, dtype: str = "bfloat16") -> Data:
    return _latent("key", *rows, dtype=dtype) | {"value": _tensor(*rows, 512, dtype=dtype)}


def paged_tnd() -> Data:
    """Two requests of two query rows over a cache of blocks of 128."""
    return {
        **_latent("query", 4, 16),
        **_keys(32, 128, 1),
        "sparse_indices": _tensor(4, 1, 2048, dtype="int32"),
        "scale_value": 0.0417,
        "block_table": _tensor(2, 16, dtype="int32"),
        "actual_seq_lengths_query": _tensor(2, dtype="int32", values=[2, 4]),
        "actual_seq_lengths_kv": _tensor(2, dtype="int32", values=[1000, 2048]),
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "attention_mode": 2,
    }


def whole_bsnd() -> Data:
    """One request of two query rows over 128 keys that are not paged."""
    return {
        **_latent("query", 1, 2, 64),
        **_keys(1, 128, 1),
        "sparse_indices": _tensor(1, 2, 1, 64, dtype="int32"),
        "scale_value": 0.0417,
        "attention_mode": 2,
    }


def _legal() -> Iterator[Sample]:
    base, whole = paged_tnd(), whole_bsnd()
    for profile in (None, "A2", "A3", "A5"):
        yield Sample(f"paged_tnd_{profile}", base, profile)
        yield Sample(f"whole_bsnd_{profile}", whole, profile)
    yield Sample("blocks_of_16_keys", base | {"sparse_block_size": 16}, "A2")
    yield Sample("statistics_of_paged_keys", base | {"return_softmax_lse": True}, "A3")
    yield Sample("sinks", base | {"sinks": _tensor(16, dtype="float32")}, "A5")
    yield Sample("no_value_on_the_host", base | {"value": None})
    float32 = _latent("query", 4, 16, dtype="float32") | _keys(32, 128, 1, dtype="float32")
    yield Sample("float32_on_the_host", base | float32)
    yield Sample("tiny_model_on_the_host", base | _sized(32, 8))
    apart = {"key": _tensor(32, 128, 1, 512, strides=[131072, 512, 512, 1])}
    yield Sample("blocks_apart", base | apart, "A5")
    yield Sample("broken_cache_strides", base | apart, "A3", ("cache_strides",))
    yield Sample("broken_half", base | float32, "A3", ("half",))


def _sized(size: int, rope: int) -> Data:
    return {
        "query": _tensor(4, 16, size),
        "query_rope": _tensor(4, 16, rope),
        "key": _tensor(32, 128, 1, size),
        "value": _tensor(32, 128, 1, size),
        "key_rope": _tensor(32, 128, 1, rope),
    }


def _broken_anywhere() -> dict[str, Data]:
    one_less = _tensor(1, dtype="int32")
    return {
        "layout_query": {"layout_query": "BNSD"},
        "layout_kv": {"layout_kv": "PA_NZ"},
        "query_rank": {"query": _tensor(4, 8192)},
        "key_rank": {"key": _tensor(32, 128, 512)},
        "sparse_mode": {"sparse_mode": 4},
        "tokens": {"next_tokens": 0},
        "block_table_given": {"block_table": None},
        "query_lengths_given": {"actual_seq_lengths_query": None},
        "kv_lengths_given": {"actual_seq_lengths_kv": None},
        "kv_heads": _keys(32, 128, 2),
        "block_size": _keys(32, 24, 1),
        "block_table": {"block_table": _tensor(3, 16, dtype="int32")},
        "kv_lengths": {"actual_seq_lengths_kv": one_less},
        "indices_rank": {"sparse_indices": _tensor(4, 2048, dtype="int32")},
        "indices_dtype": {"sparse_indices": _tensor(4, 1, 2048, dtype="int64")},
        "indices_shape": {"sparse_indices": _tensor(3, 1, 2048, dtype="int32")},
        "sparse_block_size": {"sparse_block_size": 3},
        "sparse_block_divides": {"sparse_block_size": 32, **_keys(32, 16, 1)},
        "attention_mode": {"attention_mode": 0},
        "dtype": {"query": _tensor(4, 16, 512, dtype="int8")},
        "not_empty": {"sparse_indices": _tensor(4, 1, 0, dtype="int32")},
        "rope_given": {"query_rope": None},
        "same_dtype": {"key": _tensor(32, 128, 1, 512, dtype="float16")},
        "key_size": {"key": _tensor(32, 128, 1, 576)},
        "value_shape": {"value": _tensor(16, 128, 1, 512)},
        "rope_shape": {"key_rope": _tensor(32, 128, 1, 32)},
        "sinks": {"sinks": _tensor(8, dtype="float32")},
    }


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    yield from _legal()
    base, whole = paged_tnd(), whole_bsnd()
    for rule, changes in _broken_anywhere().items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    lengths = {"actual_seq_lengths_query": _tensor(2, dtype="int32")}
    yield Sample("broken_query_lengths", whole | lengths, None, ("query_lengths",))
    yield Sample("broken_key_batch", whole | _keys(2, 128, 1), None, ("key_batch",))
    unequal = base | {"layout_kv": "TND", "layout_query": "BSND", "block_table": None}
    unequal |= _latent("query", 2, 2, 16) | _keys(3000, 1)
    unequal |= {"sparse_indices": _tensor(2, 2, 1, 2048, dtype="int32")}
    yield Sample("broken_layouts", unequal, None, ("layouts",))
    on_product: dict[str, tuple[str, Data]] = {
        "sparse_block_size_one": ("A5", {"sparse_block_size": 64}),
        "value_given": ("A2", {"value": None}),
        "heads_a5": ("A5", _heads(129)),
        "heads_a2_a3": ("A3", _heads(96)),
        "head_size": ("A3", _sized(576, 64)),
        "rope_size": ("A5", _sized(512, 32)),
        "sinks_product": ("A2", {"sinks": _tensor(16, dtype="float32")}),
    }
    for rule, (profile, changes) in on_product.items():
        yield Sample(f"broken_{rule}", base | changes, profile, (rule,))


def _heads(count: int) -> Data:
    return _latent("query", 4, count)
