"""Legal and illegal argument sets of lightning_indexer."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, ints, retyped, tensor


def paged_tnd() -> Data:
    """Two requests of two query rows over a cache of blocks of 128."""
    return {
        "query": tensor(4, 64, 128),
        "key": tensor(32, 128, 1, 128),
        "weights": tensor(4, 64),
        "actual_seq_lengths_query": ints(2, 4),
        "actual_seq_lengths_key": ints(1000, 2048),
        "block_table": tensor(2, 16, dtype="int32"),
        "layout_query": "TND",
        "layout_key": "PA_BSND",
    }


def whole_bsnd() -> Data:
    """Two requests of three query rows over 50 keys that are not paged."""
    return {
        "query": tensor(2, 3, 16, 128, dtype="float16"),
        "key": tensor(2, 50, 1, 128, dtype="float16"),
        "weights": tensor(2, 3, 16, dtype="float16"),
        "return_value": True,
    }


_FLOATS = ("query", "key", "weights")


def _legal() -> Iterator[Sample]:
    base = paged_tnd()
    for profile in (None, "A2", "A3", "A5"):
        yield Sample(f"paged_tnd_{profile}", base, profile)
        yield Sample(f"whole_bsnd_{profile}", whole_bsnd(), profile)
    yield Sample("many_keys", base | {"sparse_count": 3072}, "A3")
    yield Sample("float32_weights", base | retyped(base, "float32", "weights"), "A2")
    yield Sample("float32_on_the_host", base | retyped(base, "float32", *_FLOATS))
    yield Sample("scores_of_paged_keys_on_the_host", base | {"return_value": True})
    yield Sample("blocks_apart", base | _apart(), "A5")


def _apart() -> Data:
    return {"key": tensor(32, 128, 1, 128, strides=[32768, 128, 128, 1])}


def _broken_anywhere() -> dict[str, Data]:
    base = paged_tnd()
    return {
        "layout_query": {"layout_query": "BNSD"},
        "layout_kv": {"layout_key": "PA_NZ"},
        "query_rank": {"query": tensor(4, 8192)},
        "key_rank": {"key": tensor(32, 128, 128)},
        "sparse_mode": {"sparse_mode": 4},
        "tokens": {"pre_tokens": 5},
        "block_table_given": {"block_table": None},
        "query_lengths_given": {"actual_seq_lengths_query": None},
        "kv_lengths_given": {"actual_seq_lengths_key": None},
        "kv_heads": {"key": tensor(32, 128, 2, 128)},
        "block_size": {"key": tensor(32, 40, 1, 128)},
        "block_table": {"block_table": tensor(3, 16, dtype="int32")},
        "kv_lengths": {"actual_seq_lengths_key": tensor(2, dtype="int64")},
        "not_empty": {"key": tensor(0, 128, 1, 128)},
        "dtype": {"query": tensor(4, 64, 128, dtype="int8")},
        "sparse_count": {"sparse_count": 2049},
        "key_dtype": retyped(base, "float16", "key"),
        "key_size": {"key": tensor(32, 128, 1, 64)},
        "weights_shape": {"weights": tensor(4, 32)},
        "weights_dtype": retyped(base, "float16", "weights"),
    }


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    yield from _legal()
    base, whole = paged_tnd(), whole_bsnd()
    for rule, changes in _broken_anywhere().items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    lengths = {"actual_seq_lengths_query": tensor(3, dtype="int32")}
    yield Sample("broken_query_lengths", whole | lengths, None, ("query_lengths",))
    more = {"key": tensor(3, 50, 1, 128, dtype="float16")}
    yield Sample("broken_key_batch", whole | more, None, ("key_batch",))
    unequal = base | {"layout_key": "TND", "block_table": None, "key": tensor(3000, 1, 128)}
    unequal |= {"layout_query": "BSND", "query": tensor(2, 2, 64, 128)}
    unequal |= {"weights": tensor(2, 2, 64)}
    yield Sample("broken_layouts", unequal, None, ("layouts",))
    on_product: dict[str, tuple[str, Data]] = {
        "half": ("A3", retyped(base, "float32", *_FLOATS)),
        "heads": ("A3", {"query": tensor(4, 65, 128), "weights": tensor(4, 65)}),
        "heads_a5": ("A5", {"query": tensor(4, 12, 128), "weights": tensor(4, 12)}),
        "head_size": ("A2", {"query": tensor(4, 64, 64), "key": tensor(32, 128, 1, 64)}),
        "weights_dtype_a5": ("A5", retyped(base, "float32", "weights")),
        "values_of_paged_keys": ("A3", {"return_value": True}),
        "cache_strides": ("A3", _apart()),
    }
    for rule, (profile, changes) in on_product.items():
        yield Sample(f"broken_{rule}", base | changes, profile, (rule,))
