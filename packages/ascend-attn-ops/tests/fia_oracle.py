"""Dense float64 attention, written apart from the providers: explicit loops and masks."""

from __future__ import annotations

import math

import torch

TEMPLATE = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


def allowed(mode: int, i: int, j: int, lq: int, lkv: int, pre: int, nxt: int) -> bool:
    if mode == 0:
        return True
    if mode == 3:
        return j <= i + lkv - lq
    return i + lkv - lq - pre <= j <= i + lkv - lq + nxt


def dense(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    q_lens: list[int],
    *,
    scale: float,
    mode: int,
    pre: int = 0,
    nxt: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, N, D] and lse [T, N] in float64; +inf for rows without keys."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:2], math.inf, dtype=torch.float64)
    group = query.shape[1] // keys[0].shape[1]
    start = 0
    for key, value, lq in zip(keys, values, q_lens, strict=True):
        key, value, lkv = key.double(), value.double(), key.shape[0]
        for i in range(lq):
            seen = [j for j in range(lkv) if allowed(mode, i, j, lq, lkv, pre, nxt)]
            if not seen:
                continue
            for head in range(query.shape[1]):
                scores = key[seen, head // group] @ query[start + i, head].double() * scale
                top = scores.max()
                weights = (scores - top).exp()
                out[start + i, head] = weights @ value[seen, head // group] / weights.sum()
                lse[start + i, head] = top + weights.sum().log()
        start += lq
    return out, lse
