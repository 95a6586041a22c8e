"""Fast host provider: requests of equal query length go through batched matrix products.

Keys are read in tiles with a running softmax, so that no score tensor larger than a tile exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import attrs
import torch

from .arguments import FusedInferAttentionScoreArguments as Args

_TILE_ELEMENTS = 1 << 22  # elements of one key tile: 16 MiB in float32


@attrs.frozen(eq=False)
class _Bucket:
    """Requests of one query length.

    Attributes:
        rows: (R, Lq) token rows of the requests.
        requests: (R,) request numbers.
        kv_lens: (R,) key counts.
        kv_max: Largest key count.
    """

    rows: torch.Tensor
    requests: torch.Tensor
    kv_lens: torch.Tensor
    kv_max: int


def run_cpu(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all requests; see the argument record."""
    out = torch.zeros_like(a.query)
    lse = torch.full((*a.query.shape[:2], 1), float("inf"), dtype=torch.float32)
    for bucket in _buckets(a):
        part, part_lse = _attend(a, bucket)
        flat = bucket.rows.reshape(-1)
        out[flat] = part.to(out.dtype)
        if a.softmax_lse_flag:
            lse[flat, :, 0] = part_lse.float()
    return out, lse if a.softmax_lse_flag else lse.new_empty(0)


def _buckets(a: Args) -> list[_Bucket]:
    """Group by query length and by the magnitude of the key length."""
    groups: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    start = 0
    for request, end in enumerate(a.actual_seq_lengths or ()):
        kv_len = _kv_length(a, request)
        if end > start and kv_len > 0:
            groups[end - start, kv_len.bit_length()].append((request, start, kv_len))
        start = end
    return [_bucket(query_len, members) for (query_len, _), members in groups.items()]


def _kv_length(a: Args, request: int) -> int:
    lengths = a.actual_seq_lengths_kv or ()
    if a.paged or request == 0:
        return lengths[request]
    return lengths[request] - lengths[request - 1]


def _bucket(query_len: int, members: list[tuple[int, int, int]]) -> _Bucket:
    requests, starts, kv_lens = (torch.tensor(column) for column in zip(*members, strict=True))
    rows = starts[:, None] + torch.arange(query_len)
    return _Bucket(rows, requests, kv_lens, max(member[2] for member in members))


def _attend(a: Args, b: _Bucket) -> tuple[torch.Tensor, torch.Tensor]:
    """(R*Lq, N, D) outputs and (R*Lq, N) lse of one bucket."""
    count, query_len = b.rows.shape
    heads, size = a.kv_heads, a.query.shape[2]
    group = a.num_heads // heads
    wide = torch.promote_types(a.query.dtype, torch.float32)
    query = a.query[b.rows].to(wide).mul_(a.scale)
    query = query.view(count, query_len, heads, group, size).permute(0, 2, 3, 1, 4)
    query = query.reshape(count, heads, group * query_len, size)
    state = _RunningSoftmax.empty(query)
    for first, key, value in _tiles(a, b, wide):
        scores = query @ key.transpose(-1, -2)
        hidden = _hidden(a, b, first, key.shape[2])
        if hidden is not None:
            view = scores.view(count, heads, group, query_len, key.shape[2])
            view.masked_fill_(hidden[:, None, None], float("-inf"))
        state.add(scores, value)
    out, lse = state.result()
    out = out.view(count, heads, group, query_len, size).permute(0, 3, 1, 2, 4)
    lse = lse.view(count, heads, group, query_len).permute(0, 3, 1, 2)
    return out.reshape(-1, a.num_heads, size), lse.reshape(-1, a.num_heads)


def _tiles(
    a: Args, b: _Bucket, wide: torch.dtype
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (first key position, keys, values) with keys and values [R, KN, tile, D]."""
    heads, size = a.kv_heads, a.query.shape[2]
    unit = a.block_size if a.paged else 1
    per_token = len(b.requests) * heads * size
    step = max(_TILE_ELEMENTS // per_token // unit, 1) * unit
    for first in range(0, b.kv_max, step):
        last = min(first + step, -(-b.kv_max // unit) * unit)
        yield first, _tile(a, b, a.key, first, last, wide), _tile(a, b, a.value, first, last, wide)


def _tile(
    a: Args, b: _Bucket, rows: torch.Tensor, first: int, last: int, wide: torch.dtype
) -> torch.Tensor:
    heads, size = a.kv_heads, a.query.shape[2]
    if a.block_table is None:
        ends = torch.tensor((0, *(a.actual_seq_lengths_kv or ())))
        index = ends[b.requests, None] + torch.arange(first, last)
        return rows[index.clamp_(max=rows.shape[0] - 1)].transpose(1, 2).to(wide)
    columns = slice(first // a.block_size, last // a.block_size)
    ids = a.block_table[b.requests, columns].long()
    used = torch.arange(columns.start, columns.stop) * a.block_size < b.kv_lens[:, None]
    ids = ids.where(used, ids.new_zeros(()))  # unused columns may hold anything
    cache = rows[ids]
    if rows.dim() == 3:
        cache = cache.view(*ids.shape, a.block_size, heads, size).transpose(2, 3)
    return cache.transpose(1, 2).reshape(len(ids), heads, -1, size).to(wide)


def _hidden(a: Args, b: _Bucket, first: int, count: int) -> torch.Tensor | None:
    """bool [R, Lq or 1, tile]: keys that a row must not see; None when it sees all of them."""
    column = torch.arange(first, first + count)
    beyond = column >= b.kv_lens[:, None]
    hidden = beyond[:, None]
    if a.sparse_mode != 0:
        query_len = b.rows.shape[1]
        row = torch.arange(query_len) + (b.kv_lens[:, None] - query_len)
        right = 0 if a.sparse_mode == 3 else a.next_tokens
        hidden = hidden | (column > (row + right)[..., None])
        if a.sparse_mode == 4:
            hidden = hidden | (column < (row - a.pre_tokens)[..., None])
    return hidden if bool(hidden.any()) else None


@attrs.define(eq=False)
class _RunningSoftmax:
    """Softmax-weighted sum over tiles: maximum, sum and output so far."""

    maximum: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor

    @classmethod
    def empty(cls, query: torch.Tensor) -> _RunningSoftmax:
        """Nothing seen yet; ``query`` is [R, KN, rows, D]."""
        shape = (*query.shape[:3], 1)
        maximum = query.new_full(shape, float("-inf"))
        return cls(maximum, query.new_zeros(shape), query.new_zeros(query.shape))

    def add(self, scores: torch.Tensor, value: torch.Tensor) -> None:
        """Take in one tile: scores [R, KN, rows, tile] (overwritten), value [R, KN, tile, D]."""
        maximum = torch.maximum(self.maximum, scores.amax(-1, keepdim=True))
        shift = maximum.masked_fill(maximum.isneginf(), 0.0)
        weights = scores.sub_(shift).exp_()
        rescale = (self.maximum - shift).exp_()
        self.total = self.total * rescale + weights.sum(-1, keepdim=True)
        self.out = self.out * rescale + weights @ value
        self.maximum = maximum

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [R, KN, rows, D] and lse [R, KN, rows]; no keys: 0 and +inf."""
        empty = self.total == 0
        out = self.out / self.total.masked_fill(empty, 1.0)
        lse = (self.maximum + self.total.log()).masked_fill_(empty, float("inf"))
        return out, lse[..., 0]
