"""Legal and illegal argument sets of rotary_position_embedding."""

from __future__ import annotations

from collections.abc import Iterator

from ...operator import Sample
from .._shared.descriptions import Data, retyped, tensor


def _data(size: int = 128) -> Data:
    rotary = tensor(1, 2, 1, size)
    return {"input": tensor(2, 2, 5, size), "r1": rotary, "r2": rotary}


def samples() -> Iterator[Sample]:
    """Legal calls, and for every rule a call that breaks it."""
    base = _data()
    yield Sample("half", base, "A2")
    yield Sample("interleave", base | {"rotary_mode": "interleave"}, "A3")
    yield Sample("rotate", base | {"rotate": tensor(128, 128)}, "A2")
    per_batch = {"r1": tensor(2, 2, 1, 128), "r2": tensor(2, 2, 1, 128)}
    yield Sample("half_per_batch", base | per_batch, "A2")
    broken: dict[str, Data] = {
        "rotary_mode": {"rotary_mode": "neox"},
        "rank": {"input": tensor(2, 128)},
        "dtype": {"input": tensor(2, 2, 5, 128, dtype="int8")},
        "rotate_rank": {"rotate": tensor(1, 128, 128)},
        "head_size": _data(63),
        "same_dtype": retyped(base, "float16", "r2"),
        "rotary_shape": {"r2": tensor(1, 3, 1, 128)},
        "rotate_shape": {"rotate": tensor(64, 64)},
    }
    for rule, changes in broken.items():
        yield Sample(f"broken_{rule}", base | changes, None, (rule,))
    turned = base | {"rotate": tensor(128, 128)}
    yield Sample("broken_rotate_product", turned, "A5", ("rotate_product",))
    yield Sample("broken_head_limit", _data(896), "A2", ("head_limit",))
    interleaved = base | per_batch | {"rotary_mode": "interleave"}
    yield Sample("broken_interleave_shape", interleaved, "A2", ("interleave_shape",))
    yield Sample("interleave_per_batch_without_product", interleaved)
