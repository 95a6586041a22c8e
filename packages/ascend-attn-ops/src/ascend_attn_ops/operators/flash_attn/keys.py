"""Reading of key and value tiles for the fast host provider, whatever their layout."""

from __future__ import annotations

import attrs
import torch

from .arguments import FlashAttnArguments as Args


@attrs.frozen(eq=False)
class KeyReader:
    """Reads tiles of keys and values of some requests.

    Attributes:
        args: The call.
        unit: A tile starts at a multiple of so many keys.
    """

    args: Args
    unit: int

    @classmethod
    def of(cls, a: Args) -> KeyReader:
        """The reader of a call."""
        return cls(a, a.block_size if a.paged else 1)

    def read(
        self,
        requests: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        first: int,
        last: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (R, KN, last - first, D) at positions first .. last of the requests.

        Positions beyond a request's length are 0, whatever the cache holds there: it may hold
        NaN, which no mask removes from a product.

        Args:
            requests: (R,) request numbers.
            starts: (R,) first key row of each request (TND).
            lengths: (R,) key counts.
            first: First position, a multiple of ``unit``.
            last: One after the last position, at most the largest length.
        """
        shortest = min(max(int(lengths.min()), first), last) - first  # positions that all have
        beyond = torch.arange(first + shortest, last) >= lengths[:, None]
        tiles = []
        for rows in (self.args.k, self.args.v):
            if self.args.paged:
                tile = self._paged(rows, requests, lengths, first, last)
            elif len(requests) == 1:
                tile = self._view(rows, int(requests[0]), int(starts[0]), first, last)
            else:
                tile = self._gathered(rows, requests, starts, first, last)
            if shortest < last - first:  # never a view: one request reads exactly its length
                tile[:, :, shortest:].masked_fill_(beyond[:, None, :, None], 0)
            tiles.append(tile if tile.stride(-1) == 1 else tile.contiguous())
        return tiles[0], tiles[1]

    def _paged(
        self,
        rows: torch.Tensor,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        first: int,
        last: int,
    ) -> torch.Tensor:
        size, table = self.args.block_size, self.args.block_table
        assert table is not None  # noqa: S101 - the contract guarantees it
        columns = torch.arange(first // size, -(-last // size))
        ids = table[requests][:, columns].long()
        ids = ids.masked_fill(columns * size >= lengths[:, None], 0)  # unused ids may be anything
        if self.args.layout_kv == "PA_BBND":
            cache = rows.index_select(0, ids.flatten()).view(*ids.shape, *rows.shape[1:])
            cache = cache.flatten(1, 2).transpose(1, 2)
        else:
            cache = _heads_first(rows, ids)
            if self.args.layout_kv == "PA_NZ":
                cache = cache.transpose(3, 4).flatten(4, 5)
            cache = cache.flatten(2, 3)
        return cache[:, :, : last - first]

    def _view(
        self, rows: torch.Tensor, request: int, start: int, first: int, last: int
    ) -> torch.Tensor:
        if self.args.layout_kv == "TND":
            return rows[start + first : start + last].transpose(0, 1)[None]
        keys = rows[request : request + 1]
        keys = keys.transpose(1, 2) if self.args.layout_kv == "BSND" else keys
        return keys[:, :, first:last]

    def _gathered(
        self,
        rows: torch.Tensor,
        requests: torch.Tensor,
        starts: torch.Tensor,
        first: int,
        last: int,
    ) -> torch.Tensor:
        if self.args.layout_kv == "BNSD":
            return rows[requests, :, first:last]
        if self.args.layout_kv == "BSND":
            return rows[requests, first:last].transpose(1, 2)
        index = starts[:, None] + torch.arange(first, last)
        return rows[index.clamp_(max=rows.shape[0] - 1)].transpose(1, 2)


def _heads_first(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Blocks (R, KN, columns, ...) of a cache (blocks, KN, ...) for ids (R, columns)."""
    heads = torch.arange(rows.shape[1])[:, None]
    if rows.stride(0) != rows.shape[1] * rows.stride(1):
        return rows[ids[:, None], heads]
    flat = ids[:, None] * rows.shape[1] + heads  # copies whole (block, head) pieces: faster
    pieces = rows.flatten(0, 1).index_select(0, flat.flatten())
    return pieces.view(*flat.shape, *rows.shape[2:])
