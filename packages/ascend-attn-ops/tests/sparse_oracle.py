"""Float64 definitions of sparse attention and indexing, written apart from the providers.

Everything is a loop over requests, rows and heads on plain per-request tensors; nothing here knows
layouts, block tables or tiles.
"""

from __future__ import annotations

import math

import torch


def visible(i: int, q_len: int, kv_len: int, mode: int) -> int:
    """How many leading keys query row i may see."""
    return kv_len if mode == 0 else max(0, i + kv_len - q_len + 1)


def chosen_keys(row: list[int], seen: int, block: int) -> list[int]:
    """Key positions of an index row, by walking it entry by entry."""
    picked = []
    budget = math.ceil(seen / block)
    for count, entry in enumerate(row):
        if entry == -1 or count == budget:
            break
        for position in range(entry * block, entry * block + block):
            if 0 <= position < seen:
                picked.append(position)
    return picked


def sparse_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: list[list[int]],
    *,
    scale: float,
    block: int,
    mode: int,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One request: out [Lq, N, Dv], maximum [Lq, N], sum [Lq, N] in float64."""
    q_len, heads, _ = query.shape
    query, keys, values = query.double(), keys.double(), values.double()
    out = torch.zeros(q_len, heads, values.shape[-1], dtype=torch.float64)
    maximum, total = torch.zeros(2, q_len, heads, dtype=torch.float64)
    for i in range(q_len):
        seen = visible(i, q_len, len(keys), mode)
        picked = chosen_keys(rows[i], seen, block)
        for n in range(heads):
            scores = [float(query[i, n] @ keys[j]) * scale for j in picked]
            extra = [float(sinks[n])] if sinks is not None and seen else []
            if not scores and not extra:
                continue
            top = max(scores + extra)
            maximum[i, n] = top
            total[i, n] = sum(math.exp(s - top) for s in scores + extra)
            for s, j in zip(scores, picked, strict=True):
                out[i, n] += math.exp(s - top) / total[i, n] * values[j]
    return out, maximum, total


def index_scores(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One request: scores [Lq, Lkv] in float64, summed over heads after the ReLU."""
    q_len, heads, _ = query.shape
    scores = torch.zeros(q_len, len(keys), dtype=torch.float64)
    for h in range(heads):
        products = torch.einsum("qd,kd->qk", query[:, h].double(), keys.double())
        scores += weights[:, h, None].double() * torch.where(products > 0, products, 0.0)
    return scores
