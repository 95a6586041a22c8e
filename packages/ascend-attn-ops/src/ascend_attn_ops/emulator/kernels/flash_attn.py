"""flash_attn over dense float64 scores, and a plan that gives everything to one core.

A plan is a legal one if it covers every block once; the shortest is a single run. The attention
reads of it what a real kernel would be lost without: whether it was made, and for as many heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ..abi import INNER, AclnnError
from ..contracts import contract_check
from ..dispatch import kernel

_RECORD, _ALIGNMENT = 16, 4096  # words
_ROWS, _COLUMNS = 128, 128  # a block of the grid


@kernel("aclnnFlashAttnMetadata", check=contract_check("flash_attn_metadata"))
def flash_attn_metadata(a: Any) -> torch.Tensor:
    """Words in the argument record of ascend_attn_ops.flash_attn_metadata; one run, no merges."""
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        sums = getattr(a, name)
        if sums is not None and (sums[0] != 0 or (sums.diff() < 0).any()):
            raise AclnnError(INNER, f"{name} {sums.tolist()}: not increasing from 0")
    for name in ("seqused_q", "seqused_kv"):
        used = getattr(a, name)
        if used is not None and (used < 0).any():
            raise AclnnError(INNER, f"{name} {used.tolist()}: below 0")
    cube, vector = _cores()
    heads = _requests(a) * a.num_heads_kv
    words = torch.zeros_like(a.metadata)
    needed = _RECORD * (1 + (cube + vector) * heads)
    if len(words) != -(-needed // _ALIGNMENT) * _ALIGNMENT:
        raise AclnnError(INNER, f"metadata of {len(words)} words, needed: {needed}, rounded up")
    words[:7] = torch.tensor([1, 0, _ROWS, _COLUMNS, cube, vector, 0])
    words[_RECORD + 3] = heads
    return words


def _cores() -> tuple[int, int]:
    from ..runtime import current

    profile = current().profile
    assert profile.cube_cores is not None  # noqa: S101 - the product check has passed
    assert profile.vector_cores is not None  # noqa: S101
    return profile.cube_cores, profile.vector_cores


def _requests(a: Any) -> int:
    if a.seqused_q is not None:
        return len(a.seqused_q)
    return a.batch_size if a.cu_seqlens_q is None else len(a.cu_seqlens_q) - 1


@kernel("aclnnFlashAttn", check=contract_check("flash_attn"), workspace=4096)
def flash_attn(a: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Shapes in :class:`ascend_attn_ops.FlashAttnArguments`; rows without keys: 0 and +inf."""
    out = torch.zeros(a.attn_out.shape, dtype=torch.float64)
    lse = torch.full(a.softmax_lse.shape, math.inf, dtype=torch.float64)
    requests = list(_requests_of(a, out, lse))
    _require_plan(a.metadata, len(requests) * requests[0][2].shape[1])
    for query, target, keys, values, statistics in requests:
        found, sums = _attend(a, query, keys, values)
        target[: len(query)] = found
        if a.return_softmax_lse:
            statistics[:, : len(query)] = sums
    return out, lse if a.return_softmax_lse else None


def _require_plan(plan: torch.Tensor, heads: int) -> None:
    sections, cores = int(plan[0]), int(plan[4])
    ends = plan[_RECORD:].view(-1, _RECORD)[: max(sections, 0) * max(cores, 0), 3]
    found = int(ends.max()) if len(ends) else 0
    if found != heads:
        raise AclnnError(INNER, f"metadata: a plan of {found} heads, not {heads}")


def _requests_of(a: Any, out: torch.Tensor, lse: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Query, output, keys, values of each request as (L, N, D), and its lse as (N, S)."""
    queries = _split(a.q, a.layout_q, a.cu_seqlens_q, a.seqused_q)
    targets = _split(out, a.layout_out, a.cu_seqlens_q, None)
    for index, (query, target) in enumerate(zip(queries, targets, strict=True)):
        if a.layout_q == "TND":
            first = int(a.cu_seqlens_q[index])
            statistics = lse[:, first : first + len(target)] if a.return_softmax_lse else lse
        else:
            statistics = lse[index] if a.return_softmax_lse else lse
        yield query, target, _keys(a, a.k, index), _keys(a, a.v, index), statistics


def _split(
    tensor: torch.Tensor, layout: str, sums: torch.Tensor | None, used: torch.Tensor | None
) -> list[torch.Tensor]:
    """(L, N, D) of each request, cut to the tokens in use."""
    if layout == "TND":
        assert sums is not None  # noqa: S101 - the contract demands it
        parts = [tensor[a:b] for a, b in zip(sums.tolist(), sums.tolist()[1:], strict=False)]
    else:
        parts = list(tensor if layout == "BSND" else tensor.transpose(1, 2))
    if used is None:
        return parts
    return [part[:count] for part, count in zip(parts, used.tolist(), strict=True)]


def _keys(a: Any, cache: torch.Tensor, index: int) -> torch.Tensor:
    if not a.layout_kv.startswith("PA_"):
        return _split(cache, a.layout_kv, a.cu_seqlens_kv, a.seqused_kv)[index]
    used = int(a.seqused_kv[index])
    size = cache.shape[{"PA_BBND": 1, "PA_BNBD": 2, "PA_NZ": 3}[a.layout_kv]]
    blocks = cache[a.block_table[index, : -(-used // size)].long()]
    if a.layout_kv == "PA_BNBD":
        blocks = blocks.transpose(1, 2)
    elif a.layout_kv == "PA_NZ":
        blocks = blocks.permute(0, 3, 1, 2, 4).flatten(3)
    return blocks.flatten(0, 1)[:used]


def _attend(
    a: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (L, N, D) and lse (N, L)."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("qnd,knd->nqk", query.double(), keys) * a.softmax_scale
    scores = scores.masked_fill(~_allowed(a, len(query), len(keys)), -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    sums = (
        scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -math.inf)
    )
    sums = sums.masked_fill(sums == -math.inf, math.inf)
    return torch.einsum("nqk,knd->qnd", weights, values), sums


def _allowed(a: Any, rows: int, columns: int) -> torch.Tensor:
    """Which keys a row may see, (rows, columns), aligned bottom right."""
    distance = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
    allowed = torch.ones(rows, columns, dtype=torch.bool)
    if a.mask_mode == 3:
        return distance <= 0
    if a.mask_mode == 4 and a.win_left >= 0:
        allowed &= distance >= -a.win_left
    if a.mask_mode == 4 and a.win_right >= 0:
        allowed &= distance <= a.win_right
    return allowed
