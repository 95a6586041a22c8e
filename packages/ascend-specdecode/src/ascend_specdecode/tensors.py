"""Checks of tensor arguments that several modules share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ascend_specdecode.errors import ArgumentError

INDEX_DTYPES: Final = (torch.int32, torch.int64)
PROBABILITY_DTYPES: Final = (torch.float32, torch.float64)

_SUM_TOLERANCE: Final = 1e-3
"""How far from 1 a row of probabilities may sum: float32 rounding over any vocabulary, no more."""

_CACHED_ENTRIES: Final = 2**18
"""Entries that a CPU core's cache holds from one pass to the next: 1 MB of float32."""


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], meaning: str) -> None:
    """Refuse a tensor that is not of ``shape``; ``meaning`` names its dimensions.

    Raises:
        ArgumentError: names the tensor, what was found and what is allowed.
    """
    if list(tensor.shape) != list(shape):
        found = f"shape {list(tensor.shape)}"
        raise ArgumentError(name, found, f"shape {meaning} = {list(shape)}")


def check_tensors(named: Mapping[str, object]) -> None:
    """Refuse what is no tensor.

    Raises:
        ArgumentError: names the argument, its type and what is allowed.
    """
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(name, f"a {type(value).__name__}", "a torch.Tensor")


def as_indices(name: str, values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Return a tensor as it is, and a sequence of ints as int64 on ``device``.

    Raises:
        ArgumentError: names the argument when it is neither.
    """
    if isinstance(values, Tensor):
        return values
    if isinstance(values, Sequence) and all(type(value) is int for value in values):
        return torch.tensor(list(values), dtype=torch.int64, device=device)
    raise ArgumentError(name, repr(values), "a torch.Tensor or a sequence of int")


def check_indices(named: Mapping[str, Tensor], device: torch.device, owner: str) -> None:
    """Refuse tensors that are not int32/int64 on the device of the argument ``owner``.

    Raises:
        ArgumentError: names the tensor, what was found and what is allowed.
    """
    _check_kind(named, INDEX_DTYPES, "torch.int64 or torch.int32", device, owner)


def check_probabilities(named: Mapping[str, Tensor], device: torch.device, owner: str) -> None:
    """Refuse tensors that are not float32/float64 on the device of the argument ``owner``.

    Lower precision is refused: its rows do not sum to 1, and sampling from them is not exact.

    Raises:
        ArgumentError: names the tensor, what was found and what is allowed.
    """
    _check_kind(named, PROBABILITY_DTYPES, "torch.float32 or torch.float64", device, owner)


def check_range(
    name: str, values: Tensor, allowed: str, *, most: int | None = None, used: Tensor | None = None
) -> None:
    """Refuse a CPU tensor with an entry outside 0..most; ``allowed`` says the range in words.

    Args:
        name: what the message calls the tensor.
        values: int32 or int64.
        allowed: the range in words.
        most: the largest value; None for no limit.
        used: bool, of the same shape; the other entries may hold anything. None: all are used.

    Raises:
        ArgumentError: names the first bad entry, what was found and what is allowed.
    """
    wrong = values < 0
    if most is not None:
        wrong = wrong | (values > most)
    refuse_first(name, values, wrong if used is None else wrong & used, allowed)


def no_distributions(probabilities: Tensor) -> Tensor:
    """Return which rows [B, J] of a CPU tensor [B, J, V] are no distribution, NaN included."""
    sums, least = _sums_and_least(probabilities)
    return ~((sums - 1).abs() <= _SUM_TOLERANCE) | (least < 0)


def check_distributions(name: str, probabilities: Tensor, used: Tensor) -> None:
    """Refuse a CPU tensor with a used row that is no distribution.

    Args:
        name: what the message calls the tensor.
        probabilities: [B, J, V].
        used: [B, J] bool; the other rows may hold anything.

    Raises:
        ArgumentError: names the first bad row, what was found and what is allowed.
    """
    sums, least = _sums_and_least(probabilities)
    wrong = used & ~((sums - 1).abs() <= _SUM_TOLERANCE)  # negated, so that NaN is wrong
    allowed = f"a sum of 1 (+-{_SUM_TOLERANCE:g})"
    refuse_first(name, sums, wrong, allowed, of="a sum of ")
    refuse_first(name, least, used & (least < 0), "probabilities >= 0", of="a probability of ")


def _sums_and_least(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum and minimum of each row [B, J, V]: a few rows at a time, read from memory once."""
    rows = max(1, _CACHED_ENTRIES // max(1, probabilities[:1].numel()))
    found = [(part.sum(dim=-1), part.amin(dim=-1)) for part in probabilities.split(rows)]
    return torch.cat([sums for sums, _ in found]), torch.cat([least for _, least in found])


def check_same_dtype(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse a tensor whose dtype is not that of ``other``.

    Raises:
        ArgumentError: names the tensor, what was found and what is allowed.
    """
    if tensor.dtype != other.dtype:
        allowed = f"the dtype of {other_name} ({other.dtype})"
        raise ArgumentError(f"{name}.dtype", tensor.dtype, allowed)


def refuse_first(name: str, values: Tensor, wrong: Tensor, allowed: str, *, of: str = "") -> None:
    """Refuse a CPU tensor that has a ``wrong`` entry; the message shows the first one.

    Args:
        name: what the message calls the tensor.
        values: any shape.
        wrong: bool, the same shape.
        allowed: what is allowed, in words.
        of: words before the value that was found.

    Raises:
        ArgumentError: names the first wrong entry, what was found and what is allowed.
    """
    if bool(wrong.any()):
        first = tuple(int(index) for index in wrong.nonzero()[0])
        where = ", ".join(str(index) for index in first)
        value = values[first].item()
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        raise ArgumentError(f"{name}[{where}]", of + shown, allowed)


def _check_kind(
    named: Mapping[str, Tensor],
    dtypes: Sequence[torch.dtype],
    allowed: str,
    device: torch.device,
    owner: str,
) -> None:
    for name, tensor in named.items():
        if tensor.dtype not in dtypes:
            raise ArgumentError(f"{name}.dtype", tensor.dtype, allowed)
        if tensor.device != device:
            there = f"the device of {owner} ({device})"
            raise ArgumentError(f"{name}.device", tensor.device, there)
