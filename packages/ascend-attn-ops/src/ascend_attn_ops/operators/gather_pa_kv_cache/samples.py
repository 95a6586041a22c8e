"""Legal and illegal argument sets of gather_pa_kv_cache."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, ints, retyped, tensor


def latent_chunk() -> Data:
    """Two requests of 5 and 3 tokens out of latent caches of 512 and 64 elements."""
    return {
        "key_cache": tensor(6, 128, 1, 512),
        "value_cache": tensor(6, 128, 1, 64),
        "block_tables": tensor(2, 2, dtype="int32", values=[[1, 4], [3, 0]]),
        "seq_lens": ints(5, 3),
        "key": tensor(8, 1, 512),
        "value": tensor(8, 1, 64),
    }


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    base = latent_chunk()
    yield Sample("latent_chunk", base, "A2")
    cumulative = {"seq_lens": ints(0, 5, 8), "is_seq_lens_cumsum": True}
    yield Sample("cumulative", base | cumulative, "A3")
    yield Sample("offset", base | {"seq_offset": ints(128, 0)}, "A3")
    nz = {"key_cache": tensor(6, 32, 128, 16), "value_cache": tensor(6, 4, 128, 16)}
    yield Sample("nz", base | nz, "A2")
    broken: dict[str, Data] = {
        "cache_rank": {"key_cache": tensor(6, 128, 512)},
        "rows_rank": {"value": tensor(8, 64)},
        "table_rank": {"block_tables": ints(1, 4)},
        "length_rank": {"seq_lens": tensor(2, 1, dtype="int32")},
        "integers": {"block_tables": tensor(2, 2, dtype="float32")},
        "one_integer_dtype": {"seq_lens": ints(5, 3, dtype="int64")},
        "same_dtype": retyped(base, "float16", "key"),
        "same_rows": {"value": tensor(7, 1, 64)},
        "cache_shape": {"key_cache": tensor(6, 128, 2, 512)},
        "same_blocks": {"value_cache": tensor(6, 64, 1, 64)},
        "length_count": {"is_seq_lens_cumsum": True},
        "offset_count": {"seq_offset": ints(0)},
    }
    for rule, changes in broken.items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    strided = {"key_cache": tensor(6, 128, 1, 512, strides=[131072, 1024, 512, 1])}
    yield Sample("broken_contiguous", base | strided, "A2", ("contiguous",))
    yield Sample("strided_without_product", base | strided)
