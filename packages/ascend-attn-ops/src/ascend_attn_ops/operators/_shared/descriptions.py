"""Short descriptions of tensors for the samples of operators."""

from __future__ import annotations

from typing import Any

Data = dict[str, Any]


def tensor(*shape: int, dtype: str = "bfloat16", **more: Any) -> Data:
    """A tensor in the form of :func:`ascend_attn_ops.from_data`."""
    return {"shape": list(shape), "dtype": dtype, **more}


def ints(*values: int, dtype: str = "int32") -> Data:
    """A vector of integers with its values."""
    return tensor(len(values), dtype=dtype, values=list(values))


def retyped(data: Data, dtype: str, *names: str) -> Data:
    """These arguments of ``data`` with another dtype."""
    return {name: tensor(*data[name]["shape"], dtype=dtype) for name in names}
