"""Legal and illegal argument sets of attention_update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...operator import Sample
from .._shared.descriptions import Data, tensor


def parts(count: int, rows: int, size: int, dtype: str = "bfloat16", **more: Any) -> Data:
    """``count`` parts of ``rows`` rows of ``size`` elements."""
    return {
        "lse": [tensor(rows, dtype="float32")] * count,
        "local_out": [tensor(rows, size, dtype=dtype)] * count,
        "update_type": 0,
    } | more


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    base = parts(2, 1024, 128)
    yield Sample("two_parts", base, "A3")
    yield Sample("with_lse", parts(16, 64, 512, "float32", update_type=1), "A2")
    yield Sample("no_rows", parts(2, 0, 128), "A2")
    broken: dict[str, Data] = {
        "part_count": parts(17, 8, 128),
        "same_count": {"lse": [tensor(1024, dtype="float32")] * 3},
        "update_type": {"update_type": 2},
        "lse_dtype": {"lse": [tensor(1024, dtype="float16")] * 2},
        "lse_rank": {"lse": [tensor(32, 32, dtype="float32")] * 2},
        "out_dtype": {"local_out": [tensor(1024, 128), tensor(1024, 128, dtype="float16")]},
        "out_rank": {"local_out": [tensor(32, 32, 128)] * 2},
        "head_size": parts(2, 8, 100),
        "same_shape": {"local_out": [tensor(1024, 128), tensor(1023, 128)]},
    }
    for rule, changes in broken.items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    strided = [tensor(1024, 128, strides=[256, 1])] * 2
    yield Sample("broken_contiguous", base | {"local_out": strided}, "A2", ("contiguous",))
