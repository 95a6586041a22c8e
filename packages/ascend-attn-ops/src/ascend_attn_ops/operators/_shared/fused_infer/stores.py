"""Keys or values of all requests on the host: one token axis, or a paged cache of any strides."""

from __future__ import annotations

import attrs
import torch


@attrs.frozen(eq=False)
class RowStore:
    """Unpaged keys or values.

    Attributes:
        rows: (KT, KN, D) tokens of all requests.
        starts: (B,) int64 first row of each request.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    unit: int = 1

    def gather(self, requests: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Positions ``first`` to ``last`` of these requests, [R, KN, last - first, D]."""
        positions = torch.arange(first, last).expand(len(requests), -1)
        return self.tokens(requests, positions).transpose(1, 2)

    def tokens(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys at positions [R, P] of these requests, [R, P, KN, D]; beyond the end: any."""
        index = (self.starts[requests, None] + positions).clamp_(0, max(len(self.rows) - 1, 0))
        chosen = self.rows.index_select(0, index.reshape(-1))
        return chosen.view(*positions.shape, *self.rows.shape[1:])


@attrs.frozen(eq=False)
class PagedStore:
    """A paged cache.

    Attributes:
        cache: (num_blocks, KN, block_size, D) of any strides, or NZ
            (num_blocks, KN, D/16, block_size, 16).
        table: (B, max_blocks) int32 block ids; entries that no length reads may hold anything.
        used: (B,) int64 number of entries that lengths read.
        unit: Tokens per block.
    """

    cache: torch.Tensor
    table: torch.Tensor
    used: torch.Tensor
    unit: int

    def gather(self, requests: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Positions of whole blocks of these requests, [R, KN, last - first, D]."""
        columns = torch.arange(first // self.unit, last // self.unit)
        ids = self._ids(requests, columns.expand(len(requests), -1))
        if self.cache.dim() == 5:
            blocks = self.cache[ids].permute(0, 2, 1, 4, 3, 5)
            return blocks.reshape(len(ids), self.cache.shape[1], last - first, -1)
        return _gather_blocks(self.cache, ids)

    def tokens(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys at positions [R, P] of these requests, [R, P, KN, D]; beyond the end: any."""
        ids = self._ids(requests, positions.div(self.unit, rounding_mode="floor"))
        offsets = positions % self.unit
        if self.cache.dim() == 5:
            return self.cache[ids, :, :, offsets].flatten(3)
        return self.cache[ids, :, offsets]

    def _ids(self, requests: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Block ids [R, C] as int64: block id times block stride exceeds 32 bits."""
        legal = (columns >= 0) & (columns < self.used[requests, None])
        ids = self.table[requests[:, None], columns.clamp(0, self.table.shape[1] - 1)].long()
        return ids.where(legal, ids.new_zeros(()))


def _gather_blocks(cache: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Blocks [R, C] of a (num_blocks, KN, block_size, D) cache as [R, KN, C * block_size, D].

    One copy of long runs: the cache is read as rows of one head's block, or of one token, so that
    nothing has to be transposed afterwards.
    """
    blocks, heads, unit, size = cache.shape
    chunk = _run_length(cache)
    if chunk is None:
        moved = cache[ids].transpose(1, 2)
        return moved.reshape(len(ids), heads, -1, size)
    strides = [stride // chunk for stride in cache.stride()[:3]]
    index = ids[:, None] * strides[0] + (torch.arange(heads) * strides[1])[:, None]
    last = (blocks - 1) * strides[0] + (heads - 1) * strides[1]
    if chunk == size:
        index = index[..., None] + torch.arange(unit) * strides[2]
        last += (unit - 1) * strides[2]
    rows = cache.as_strided((last + 1, chunk), (chunk, 1))
    return rows.index_select(0, index.reshape(-1)).view(len(ids), heads, -1, size)


def _run_length(cache: torch.Tensor) -> int | None:
    """Longest run (a head's block, else a token) that all addresses are multiples of, or None."""
    _, _, unit, size = cache.shape
    block, head, token, element = cache.stride()
    if cache.numel() == 0 or (element != 1 and size > 1):
        return None
    whole = unit * size
    if token == size and block % whole == head % whole == 0:
        return whole
    return size if block % size == head % size == token % size == 0 else None
