"""Legal and illegal argument sets of reshape_and_cache."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, ints, retyped, tensor


def plain() -> Data:
    """16 tokens of 4 heads into two blocks of 32."""
    return {
        "key": tensor(16, 4, 32, dtype="float16"),
        "value": tensor(16, 4, 64, dtype="float16"),
        "key_cache": tensor(2, 32, 4, 32, dtype="float16"),
        "value_cache": tensor(2, 32, 4, 64, dtype="float16"),
        "slot_indices": ints(*range(16)),
    }


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    base = plain()
    nz = base | {
        "key_cache": tensor(2, 8, 32, 16, dtype="float16"),
        "value_cache": tensor(2, 16, 32, 16, dtype="float16"),
    }
    yield Sample("norm", base, "A2")
    yield Sample("nz", nz, "310P")
    broken: dict[str, Data] = {
        "rows_rank": {"key": tensor(16, 128, dtype="float16")},
        "cache_rank": {"key_cache": tensor(2, 32, 128, dtype="float16")},
        "slot_rank": {"slot_indices": tensor(16, 1, dtype="int32")},
        "slot_dtype": {"slot_indices": tensor(16, dtype="int64")},
        "same_dtype": retyped(base, "bfloat16", "key"),
        "same_tokens": {"value": tensor(16, 2, 64, dtype="float16")},
        "slot_count": {"slot_indices": ints(1, 2)},
        "cache_shape": {"key_cache": tensor(2, 32, 2, 32, dtype="float16")},
    }
    for rule, changes in broken.items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    four = ("key", "value", "key_cache", "value_cache")
    yield Sample("broken_dtype", base | retyped(base, "float32", *four), "A2", ("dtype",))
    yield Sample("float32_without_product", base | retyped(base, "float32", *four))
    bfloat16 = nz | retyped(nz, "bfloat16", *four)
    yield Sample("broken_product_dtype", bfloat16, "310P", ("product_dtype",))
    yield Sample("broken_nz_caches", base, "310P", ("nz_caches",))
    yield Sample("broken_plain_caches", nz, "A3", ("plain_caches",))
    strided = {"key": tensor(16, 4, 32, dtype="float16", strides=[256, 64, 1])}
    yield Sample("broken_contiguous", base | strided, "A2", ("contiguous",))
