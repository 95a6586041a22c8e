"""Requests that one call takes, and which keys their rows may see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import attrs
import torch

from .arguments import FlashAttnArguments as Args
from .lengths import Side


@attrs.frozen(eq=False)
class Chunk:
    """Requests of one query length that one call takes.

    Attributes:
        rows: (R, Lq) query rows.
        requests: (R,) request numbers.
        kv_start: (R,) first key row of each request (TND).
        kv_lens: (R,) key counts, all positive.
    """

    rows: torch.Tensor
    requests: torch.Tensor
    kv_start: torch.Tensor
    kv_lens: torch.Tensor

    def only(self, index: int) -> Chunk:
        """The chunk of one of the requests."""
        part = slice(index, index + 1)
        return Chunk(self.rows[part], self.requests[part], self.kv_start[part], self.kv_lens[part])


def chunks(a: Args, queries: Side, keys: Side, tile: int) -> Iterator[Chunk]:
    """Requests by query length, longest keys first, as many as fill ``tile`` elements."""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    lengths = zip(queries.length.tolist(), keys.length.tolist(), strict=True)
    for request, (query_len, kv_len) in enumerate(lengths):
        if query_len and kv_len:
            groups[query_len].append((kv_len, request))
    per_key = a.kv_heads * a.head_dim
    for query_len, members in groups.items():
        members.sort(reverse=True)
        while members:
            count = max(tile // (members[0][0] * per_key), 1)
            requests = torch.tensor([request for _, request in members[:count]])
            rows = queries.start[requests, None] + torch.arange(query_len)
            yield Chunk(rows, requests, keys.start[requests], keys.length[requests])
            members = members[count:]


def _shift(chunk: Chunk) -> torch.Tensor:
    """(R,) key position that the first query row of a request stands at."""
    return chunk.kv_lens - chunk.rows.shape[1]


def visible_range(a: Args, chunk: Chunk, rows: slice, first: int, last: int) -> tuple[int, int]:
    """Range of keys, within first .. last, that any of the rows may see."""
    shift = _shift(chunk)
    if a.mask_mode == 4 and a.win_left != -1:
        first = max(first, int(shift.min()) + rows.start - a.win_left)
    if a.mask_mode == 3 or (a.mask_mode == 4 and a.win_right != -1):
        right = 0 if a.mask_mode == 3 else a.win_right
        last = min(last, int(shift.max()) + rows.stop + right)
    return first, last


def hidden_keys(a: Args, chunk: Chunk, rows: slice, low: int, high: int) -> torch.Tensor | None:
    """bool (R, rows, keys): keys that a row must not see; None when it sees all of them."""
    column = torch.arange(low, high)
    hidden = (column >= chunk.kv_lens[:, None])[:, None]
    row = (torch.arange(rows.start, rows.stop) + _shift(chunk)[:, None])[..., None]
    if a.mask_mode == 3:
        hidden = hidden | (column > row)
    if a.mask_mode == 4 and a.win_left != -1:
        hidden = hidden | (column < row - a.win_left)
    if a.mask_mode == 4 and a.win_right != -1:
        hidden = hidden | (column > row + a.win_right)
    if not bool(hidden.any()):
        return None
    return hidden.expand(-1, rows.stop - rows.start, -1)
