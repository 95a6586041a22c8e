"""Fast choice of the best keys of each query row, for the host providers of the indexers.

Requests of equal query length and similar key length go together; rows and keys are taken in
tiles, so that no tensor grows with rows x heads x keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import attrs
import torch

from .sequences import KeyRows, QueryRows

TILE_ELEMENTS = 1 << 22  # elements of one tile of products: 16 MiB in float32
SCORE_ELEMENTS = 1 << 24  # elements of the summed scores of some rows: 64 MiB in float32

Read = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Keys [R, c, D] for requests [R, 1] and positions [R, c], float32 or float64."""


@attrs.frozen(eq=False)
class KeyScoring:
    """One call, flattened to rows.

    Attributes:
        query: (T, N, D), quantised ones too; tiles are computed in float32 (float64 for float64).
        weights: (T, N) weight of each head.
        rows: Requests of the rows.
        keys: Places of the keys.
        seen: (T,) number of leading keys that each row may choose from.
        read: Reads keys.
        count: k.
        query_scale: (T, N) multiplies the products of a row and head, or None.
    """

    query: torch.Tensor
    weights: torch.Tensor
    rows: QueryRows
    keys: KeyRows
    seen: torch.Tensor
    read: Read
    count: int
    query_scale: torch.Tensor | None = None


def wide_dtype(query: torch.Tensor) -> torch.dtype:
    """float64 for float64, else float32; 8-bit floats have no promotion rule of their own."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def best_keys(p: KeyScoring) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, k) int32 positions by descending score, -1 behind them, and their scores, -inf there."""
    tokens = p.query.shape[0]
    positions = torch.full((tokens, p.count), -1, dtype=torch.int32)
    wide = wide_dtype(p.query)
    values = torch.full((tokens, p.count), float("-inf"), dtype=wide)
    for requests, row in _tiles(p):
        seen = p.seen[row][..., None]
        scores = _scores(p, requests, row, int(seen.max()))
        scores.masked_fill_(torch.arange(scores.shape[-1]) >= seen, float("-inf"))
        top = scores.topk(min(p.count, scores.shape[-1]))
        chosen = top.indices.where(top.indices < seen, -1)
        width = chosen.shape[-1]
        positions[row, :width] = chosen.int()
        values[row, :width] = top.values
    return positions, values


def _tiles(p: KeyScoring) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield requests [R] and their rows [R, q], all rows that see a key once."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    lengths = zip(p.rows.lengths.tolist(), p.keys.lengths.tolist(), strict=True)
    for request, (query_len, kv_len) in enumerate(lengths):
        if query_len and kv_len:
            groups[query_len, kv_len.bit_length()].append(request)
    for (query_len, _), members in groups.items():
        most = int(p.keys.lengths[members].max())
        for requests in torch.tensor(members).split(max(SCORE_ELEMENTS // most, 1)):
            step = _rows_per_tile(p, len(requests), most)
            for offsets in torch.arange(query_len).split(step):
                row = p.rows.starts[requests, None] + offsets
                if bool(p.seen[row].any()):
                    yield requests, row


def _rows_per_tile(p: KeyScoring, requests: int, keys: int) -> int:
    """Rows of each request, so that scores and products (of 64 keys or more) stay in bounds."""
    by_scores = SCORE_ELEMENTS // (requests * keys)
    by_products = TILE_ELEMENTS // (requests * p.query.shape[1] * 64)
    return max(min(by_scores, by_products), 1)


def _scores(p: KeyScoring, requests: torch.Tensor, row: torch.Tensor, keys: int) -> torch.Tensor:
    """Scores [R, q, keys] summed over the heads after the ReLU."""
    count, rows = row.shape
    heads, size = p.query.shape[1:]
    wide = wide_dtype(p.query)
    query = p.query[row].to(wide)
    if p.query_scale is not None:
        query = query * p.query_scale[row].to(wide)[..., None]
    query = query.view(count, rows * heads, size)
    weights = p.weights[row].to(wide).view(count * rows, 1, heads)
    scores = query.new_empty(count, rows, keys)
    last = p.keys.lengths[requests, None] - 1
    step = max(TILE_ELEMENTS // (count * max(rows * heads, size)), 1)
    for position in torch.arange(keys).split(step):
        key = p.read(requests[:, None], torch.minimum(position, last))
        products = (query @ key.transpose(1, 2)).relu_()
        summed = weights @ products.view(count * rows, heads, -1)
        scores[..., position[0] : position[-1] + 1] = summed.view(count, rows, -1)
    return scores
