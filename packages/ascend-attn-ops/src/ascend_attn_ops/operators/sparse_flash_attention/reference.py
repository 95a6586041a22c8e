"""The formula row by row, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._shared.reference_rows import real_rows, request_keys
from .._shared.sequences import Sequences
from .arguments import SparseFlashAttentionArguments as Args

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def selected_keys(entries: list[int], limit: int, block: int) -> list[int]:
    """J(i): positions of the keys that a row reads, in order, repetitions included."""
    selected: list[int] = []
    for x in entries[: max(-(-limit // block), 0)]:
        if x == -1:
            break
        if 0 <= x * block < limit:
            selected += range(x * block, min((x + 1) * block, limit))
    return selected


def run_reference(a: Args) -> Outputs:
    """Attention of every row over its selected keys; see the argument record."""
    assert a.query_rope is not None  # noqa: S101 - the contract guarantees it
    assert a.key_rope is not None  # noqa: S101 - the contract guarantees it
    key, value, key_rope = a.key, a.key if a.value is None else a.value, a.key_rope
    query = torch.cat([a.query, a.query_rope], -1)

    def read(request: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [request_keys(a.sequences, store, request) for store in (key, key_rope)]
        return torch.cat(rows, -1), request_keys(a.sequences, value, request)

    out, maximum, total = attend_rows(
        a.sequences, query, read, indices=a.sparse_indices, scale=a.scale_value,
        block=a.sparse_block_size, sparse_mode=a.sparse_mode, sinks=a.sinks,
    )  # fmt: skip
    return (
        out.view(a.query.shape).to(a.query.dtype),
        *shaped_statistics(a.layout_query, a.query, maximum, total, wanted=a.return_softmax_lse),
    )


def attend_rows(
    s: Sequences,
    query: torch.Tensor,
    read: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    *,
    indices: torch.Tensor,
    scale: float,
    block: int,
    sparse_mode: int,
    sinks: torch.Tensor | None = None,
) -> Outputs:
    """out (T, N, Dv), maximum and sum (T, N); ``read`` gives keys and values of a request."""
    wide = torch.promote_types(query.dtype, torch.float32)
    query = query.reshape(s.tokens, *query.shape[-2:]).to(wide)
    indices = indices.reshape(s.tokens, -1)
    pairs = [tuple(part.to(wide) for part in read(request)) for request in range(s.batch)]
    out = query.new_zeros(*query.shape[:2], pairs[0][1].shape[-1])
    maximum, total = torch.zeros(2, *query.shape[:2])
    for row in real_rows(s, sparse_mode):
        key, value = pairs[row.request]
        chosen = selected_keys(indices[row.number].tolist(), row.limit, block)
        scores = scale * query[row.number] @ key[chosen].T
        n = row.number
        if row.limit > 0 and (chosen or sinks is not None):
            out[n], maximum[n], total[n] = _softmax_sum(scores, value[chosen], sinks)
    return out, maximum, total


def _softmax_sum(
    scores: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out (N, Dv), maximum (N,) and sum (N,) for scores (N, J) and values (J, Dv)."""
    every = scores if sinks is None else torch.cat([scores, sinks[:, None].to(scores)], -1)
    maximum = every.amax(-1)
    total = (every - maximum[:, None]).exp().sum(-1)
    weights = (scores - maximum[:, None]).exp()
    return weights @ value / total[:, None], maximum, total


def shaped_statistics(
    layout: str, query: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, *, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and sum (T, N) in the operator's output shapes, or empty when not asked for."""
    if not wanted:
        return torch.zeros(0), torch.zeros(0)
    if layout == "TND":
        return maximum[None], total[None]
    shape = query.shape[:-1]
    return maximum.view(shape)[:, None], total.view(shape)[:, None]
