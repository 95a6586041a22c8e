"""What predicates find in single tensors: dtypes, ranks, shapes, strides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...arguments import dtype_name
from ...contract import Finding


def given(args: Any, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors among these arguments that were passed, by name."""
    tensors = {name: getattr(args, name) for name in names}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def wrong_rank(args: Any, names: Iterable[str], *ranks: int) -> Finding | None:
    """The first of these tensors that has another rank."""
    for name, tensor in given(args, names).items():
        if tensor.dim() not in ranks:
            return Finding(f"rank {tensor.dim()} {list(tensor.shape)}", parameter=name)
    return None


def wrong_dtype(args: Any, names: Iterable[str], allowed: Sequence[str]) -> Finding | None:
    """The first of these tensors whose dtype is not allowed."""
    for name, tensor in given(args, names).items():
        if dtype_name(tensor.dtype) not in allowed:
            return Finding(dtype_name(tensor.dtype), parameter=name)
    return None


def unequal_dtypes(args: Any, names: Iterable[str]) -> str | None:
    """The dtypes of these tensors when they are not one."""
    found = {name: dtype_name(t.dtype) for name, t in given(args, names).items()}
    if len(set(found.values())) < 2:
        return None
    return ", ".join(f"{name} {dtype}" for name, dtype in found.items())


def wrong_shape(args: Any, expected: Mapping[str, tuple[int, ...]]) -> Finding | None:
    """The first passed tensor whose shape is not the expected one."""
    for name, tensor in given(args, expected).items():
        if tuple(tensor.shape) != expected[name]:
            return Finding(str(list(tensor.shape)), str(list(expected[name])), name)
    return None


def strided(args: Any, names: Iterable[str]) -> str | None:
    """The tensors among these that are not contiguous."""
    found = [
        f"{name} strides {tuple(t.stride())}"
        for name, t in given(args, names).items()
        if not t.is_contiguous()
    ]
    return ", ".join(found) or None


def first_element(name: str, tensor: torch.Tensor, bad: torch.Tensor) -> str | None:
    """``name[i] = value`` for the first true element of ``bad``, or None."""
    places = bad.nonzero()
    if not places.numel():
        return None
    index = places[0].tolist()
    return f"{name}{index} = {tensor[tuple(index)].item()}"
