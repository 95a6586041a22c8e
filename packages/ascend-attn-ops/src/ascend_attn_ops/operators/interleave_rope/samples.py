"""Legal and illegal argument sets of interleave_rope."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, retyped, tensor


def _data(size: int = 64) -> Data:
    rotary = tensor(2, 1, 3, size)
    return {"x": tensor(2, 8, 3, size), "cos": rotary, "sin": rotary}


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    base = _data()
    yield Sample("per_position", base, "A2")
    one = tensor(2, 1, 1, 64)
    yield Sample("one_position", base | {"cos": one, "sin": one}, "A3")
    broken: dict[str, Data] = {
        "rank": {"x": tensor(16, 3, 64)},
        "dtype": {"x": tensor(2, 8, 3, 64, dtype="int8")},
        "head_size": _data(128),
        "same_dtype": retyped(base, "float16", "cos"),
        "rotary_shape": {"cos": tensor(2, 2, 3, 64)},
    }
    for rule, changes in broken.items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    float32 = retyped(base, "float32", "x", "cos", "sin")
    yield Sample("broken_half", base | float32, "A2", ("half",))
    yield Sample("float32_without_product", base | float32)
    strided = {"x": tensor(2, 8, 3, 64, strides=[1536, 64, 512, 1])}
    yield Sample("broken_contiguous", base | strided, "A2", ("contiguous",))
