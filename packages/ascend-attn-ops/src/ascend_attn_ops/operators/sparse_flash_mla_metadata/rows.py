"""The rows of a call, their blocks of keys and what they cost.

Source: ops-transformer sparse_flash_mla_metadata AICPU kernel (block sizes, costs).
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from ...context import current_profile
from .._shared.flash_attn import Cores, current_cores
from .arguments import SparseFlashMlaMetadataArguments as Args

Ints = npt.NDArray[np.int64]
_ROWS_OF_CUBE = 256  # fused (query, head) rows of a block on A2 and A3
_HEADS_OF_CORE = 64  # heads of a row that one core of Ascend950 takes


@attrs.frozen
class Machine:
    """What a plan is made for.

    Attributes:
        cores: Cores of the product.
        pairs: Whether two cube cores share each row.
        m: Fused rows of a block.
        s2: Keys of a block.
    """

    cores: Cores
    pairs: bool
    m: int
    s2: int


def machine_for(a: Args) -> Machine:
    """Block sizes by family: that of the current profile, without one Ascend950's."""
    profile = current_profile()
    heads = a.num_heads_q
    if profile is None or profile.family.value == "A5":
        return Machine(current_cores(), heads > _HEADS_OF_CORE, heads, 128)
    rows = heads if a.has_indices else _ROWS_OF_CUBE // heads * heads
    return Machine(current_cores(), False, rows, 512)


@attrs.frozen(eq=False)
class PlanRows:
    """Every row in order.

    Attributes:
        request: (R,) request of each row.
        number: (R,) number of the row within its request.
        blocks: (R,) blocks of keys that it sees.
        cost: (R,) cost of the row.
        last: (R,) cost of its last block.
    """

    request: Ints
    number: Ints
    blocks: Ints
    cost: Ints
    last: Ints


def plan_rows(a: Args, machine: Machine) -> PlanRows:
    """All rows of a call, without a loop over them."""
    query, ori, cmp = query_lengths(a), ori_lengths(a), cmp_lengths(a)
    heads = a.num_heads_q
    counts = -(-query * heads // machine.m)
    request = np.repeat(np.arange(len(query)), counts)
    number = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = number * machine.m // heads
    high = np.minimum((number + 1) * machine.m, query[request] * heads)
    last = (high - 1) // heads
    height = high - number * machine.m
    seen_ori = _visible_ori(a, first, last, query[request], ori[request])
    seen_cmp = _visible_cmp(a, last, query, cmp, request)
    if a.has_indices:
        seen_cmp = np.minimum(seen_cmp, _entries(a, request, first))
    return _priced(machine, request, number, height, seen_ori, seen_cmp)


def _visible_ori(a: Args, first: Ints, last: Ints, query: Ints, keys: Ints) -> Ints:
    """Original keys that at least one query of the row sees."""
    shift = keys - query
    windowed = a.ori_mask_mode == 4
    begin = np.zeros_like(first)
    if windowed and a.ori_win_left >= 0:
        begin = np.maximum(first + shift - a.ori_win_left, 0)
    end = keys
    if a.ori_mask_mode == 3 or (windowed and a.ori_win_right >= 0):
        end = np.minimum(keys, last + shift + 1 + (a.ori_win_right if windowed else 0))
    seen: Ints = np.maximum(end - begin, 0)
    return seen


def _visible_cmp(a: Args, last: Ints, query: Ints, cmp: Ints, request: Ints) -> Ints:
    """Compressed keys that the last query of the row sees."""
    if a.cmp_mask_mode == 0:
        return cmp[request]
    original = cmp * a.cmp_ratio
    if a.cmp_residual_kv is not None:
        original = original + _values(a.cmp_residual_kv)
    reach = (original - query)[request] + last + 1
    seen: Ints = np.clip(reach // a.cmp_ratio, 0, cmp[request])
    return seen


def _entries(a: Args, request: Ints, first: Ints) -> Ints:
    """Indices that the row reads."""
    if a.cmp_topk_length is None:
        return np.full_like(request, a.cmp_topk)
    if a.layout_q == "TND" and a.cu_seqlens_q is not None:
        start = _values(a.cu_seqlens_q)[request]
    else:
        start = request * a.max_seqlen_q
    entries: Ints = _values(a.cmp_topk_length.flatten())[start + first]
    return entries


def _priced(
    machine: Machine, request: Ints, number: Ints, height: Ints, ori: Ints, cmp: Ints
) -> PlanRows:
    blocks, cost = np.zeros_like(request), np.zeros_like(request)
    last = np.zeros_like(request)
    for seen in (ori, cmp):
        count = -(-seen // machine.s2)
        tail = seen - np.maximum(count - 1, 0) * machine.s2
        last_cost = _block_cost(height, tail)
        full_cost = _block_cost(height, np.full_like(seen, machine.s2))
        cost += np.where(count > 0, (count - 1) * full_cost + last_cost, 0)
        last = np.where(count > 0, last_cost, last)
        blocks += count
    return PlanRows(request, number, blocks, cost, last)


def _block_cost(rows: Ints, keys: Ints) -> Ints:
    return 6 * -(-rows // 16) + 10 * -(-keys // 64)


def query_lengths(a: Args) -> Ints:
    """(B,) queries per request."""
    ends = a.cu_seqlens_q if a.layout_q == "TND" else None
    return _lengths(a, a.seqused_q, ends, a.max_seqlen_q)


def ori_lengths(a: Args) -> Ints:
    """(B,) original keys per request."""
    ends = a.cu_seqlens_ori_kv if a.layout_kv == "TND" else None
    return _lengths(a, a.seqused_ori_kv, ends, a.max_seqlen_ori_kv)


def cmp_lengths(a: Args) -> Ints:
    """(B,) compressed keys per request."""
    if not a.has_cmp_kv:
        return np.zeros(a.batch, dtype=np.int64)
    ends = a.cu_seqlens_cmp_kv if a.layout_kv == "TND" else None
    return _lengths(a, a.seqused_cmp_kv, ends, a.max_seqlen_cmp_kv)


def _lengths(a: Args, used: torch.Tensor | None, ends: torch.Tensor | None, longest: int) -> Ints:
    if used is not None:
        return _values(used)
    if ends is not None:
        return np.diff(_values(ends))
    return np.full(a.batch, longest, dtype=np.int64)


def _values(tensor: torch.Tensor) -> Ints:
    values: Any = tensor.detach().cpu().numpy()
    return np.asarray(values, dtype=np.int64)
