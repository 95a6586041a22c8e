"""What flash_attn and flash_attn_metadata share: layouts, lengths and masks of a call.

Dimension letters: B requests, S tokens per request, T tokens of all requests, N heads,
D head size, P cache blocks, L slots per block, E pieces of 16 of the head size (NZ format).
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import attrs
import torch

from ascend_hwprofile import HardwareProfile, profile_for

from ...arguments import dtype_name
from ...context import current_profile

AXES = {
    "BSND": "BSND",
    "BNSD": "BNSD",
    "TND": "TND",
    "PA_BBND": "PLND",
    "PA_BNBD": "PNLD",
    "PA_NZ": "PNELd",
}
UNLIMITED = -1  # a window side of -1 hides nothing
DEFAULT_PROFILE = "A5"  # bin 950PR_9599: 36 cube and 72 vector cores, as the vendor's test tables


def is_paged(layout: str) -> bool:
    """Whether keys of this layout live in cache blocks."""
    return layout.startswith("PA_")


def size_of(tensor: torch.Tensor, layout: str, letter: str) -> int:
    """Size of the dimension ``letter`` of a tensor in ``layout``."""
    axes = AXES[layout]
    if letter == "D" and layout == "PA_NZ":
        return tensor.shape[axes.index("E")] * tensor.shape[axes.index("d")]
    return tensor.shape[axes.index(letter)]


def bad_lengths(name: str, tensor: torch.Tensor | None) -> str | None:
    """What is wrong with the form of a length tensor, or None."""
    if tensor is None or (tensor.dim() == 1 and tensor.dtype == torch.int32):
        return None
    return f"{name} {dtype_name(tensor.dtype)}{list(tensor.shape)}"


def bad_prefix_sums(name: str, tensor: torch.Tensor | None, last: int | None) -> str | None:
    """The first wrong value of cumulative lengths, or None; reads the tensor."""
    if tensor is None:
        return None
    ends = tensor.tolist()
    if ends[0] != 0:
        return f"{name}[0] = {ends[0]}, not 0"
    for index, (before, value) in enumerate(pairwise(ends), 1):
        if value < before:
            return f"{name}[{index}] = {value} after {before}"
    if last is not None and ends[-1] != last:
        return f"{name}[{len(ends) - 1}] = {ends[-1]}, but there are {last} tokens"
    return None


def bad_used_lengths(name: str, used: torch.Tensor | None, room: list[int] | int) -> str | None:
    """The first length outside 0 .. room, or None; reads the tensor."""
    if used is None:
        return None
    lengths = used.tolist()
    rooms = [room] * len(lengths) if isinstance(room, int) else room
    for index, (length, limit) in enumerate(zip(lengths, rooms, strict=True)):
        if not 0 <= length <= limit:
            return f"{name}[{index}] = {length}, room for {limit}"
    return None


@attrs.frozen
class Cores:
    """Core counts that a plan is made for."""

    cube: int
    vector: int


@cache
def _default_profile() -> HardwareProfile:
    return profile_for(DEFAULT_PROFILE)


def current_cores() -> Cores:
    """Core counts of the context's profile, else of the default A5 bin (36 cube, 72 vector).

    Raises:
        ValueError: The profile does not state its core counts.
    """
    profile = current_profile() or _default_profile()
    if profile.cube_cores is None or profile.vector_cores is None:
        raise ValueError(
            f"profile: found {profile.soc_name} without core counts, "
            "allowed: a profile that states cube_cores and vector_cores"
        )
    return Cores(profile.cube_cores, profile.vector_cores)
