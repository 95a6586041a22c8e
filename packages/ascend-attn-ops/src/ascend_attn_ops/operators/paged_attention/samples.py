"""Legal and illegal argument sets of paged_attention."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, retyped, tensor

_FLOATS = ("query", "key_cache", "value_cache", "out")


def plain(size: int = 128, value_size: int = 128) -> Data:
    """8 decode rows of 32 heads over 64 blocks of 128."""
    return {
        "query": tensor(8, 32, size, dtype="float16"),
        "key_cache": tensor(64, 128, 8, size, dtype="float16"),
        "value_cache": tensor(64, 128, 8, value_size, dtype="float16"),
        "num_kv_heads": 8,
        "num_heads": 32,
        "scale_value": 0.088,
        "block_table": tensor(8, 4, dtype="int32"),
        "context_lens": tensor(8, dtype="int32"),
        "out": tensor(8, 32, value_size, dtype="float16"),
    }


def nz() -> Data:
    """The same with NZ caches."""
    caches = tensor(64, 64, 128, 16, dtype="float16")
    return plain() | {"key_cache": caches, "value_cache": caches}


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    base = plain()
    yield Sample("plain", base, "A2")
    yield Sample("nz", nz(), "310P")
    yield Sample("unequal_sizes", plain(288, 96), "A2")
    yield Sample("float32_without_product", base | retyped(base, "float32", *_FLOATS))
    for rule, changes in _broken(base).items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    yield Sample("broken_half", base | retyped(base, "float32", *_FLOATS), "A2", ("half",))
    bfloat16 = nz() | retyped(nz(), "bfloat16", *_FLOATS)
    yield Sample("broken_product_dtype", bfloat16, "310P", ("product_dtype",))
    yield Sample("broken_nz_caches", base, "310P", ("nz_caches",))
    yield Sample("broken_plain_caches", nz(), "A3", ("plain_caches",))
    small = tensor(64, 8, 8, 128, dtype="float16")
    blocks = {"key_cache": small, "value_cache": small}
    yield Sample("broken_block_size", base | blocks, "A2", ("block_size",))
    strided = {"query": tensor(8, 32, 128, dtype="float16", strides=[8192, 256, 1])}
    yield Sample("broken_contiguous", base | strided, "A2", ("contiguous",))


def _broken(base: Data) -> dict[str, Data]:
    return {
        "heads": {"num_kv_heads": 5},
        "rank": {"query": tensor(8, 4096, dtype="float16")},
        "cache_rank": {"key_cache": tensor(64, 128, 1024, dtype="float16")},
        "table_rank": {"block_table": tensor(8, dtype="int32")},
        "lens_rank": {"context_lens": tensor(8, 1, dtype="int32")},
        "integers": {"context_lens": tensor(8, dtype="int64")},
        "dtype": retyped(base, "float8_e4m3fn", "key_cache", "value_cache"),
        "same_dtype": retyped(base, "bfloat16", "query"),
        "query_heads": {"query": tensor(8, 16, 128, dtype="float16")},
        "out_shape": {"out": tensor(7, 32, 128, dtype="float16")},
        "cache_shape": {"key_cache": tensor(64, 128, 4, 128, dtype="float16")},
        "one_row_per_request": {"block_table": tensor(4, 4, dtype="int32")},
    }
