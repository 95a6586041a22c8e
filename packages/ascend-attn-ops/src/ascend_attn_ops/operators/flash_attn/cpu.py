"""Fast host provider: requests of equal query length share batched flash attention calls.

Keys are gathered in tiles and reach torch's CPU flash attention kernel, which also returns the
logarithm of the sum of exponentials; tiles of a long request are merged by it. Few query rows in
float32 read the cache blocks in place instead, where the copy would cost as much as the products.
"""

from __future__ import annotations

import attrs
import torch

from .arguments import FlashAttnArguments as Args
from .chunks import Chunk, chunks, hidden_keys, visible_range
from .in_place import attend_in_place, reads_in_place
from .keys import KeyReader
from .lengths import kv_side
from .rows import outputs, query_rows, with_sinks

_TILE_ELEMENTS = 1 << 21  # elements of one key tile: 8 MiB in float32, about the last-level cache
_QUERY_TILE = 256  # query rows per call: their mask stays small, keys no row sees are left out
_FOLD_BELOW = 32  # query rows below which a group's heads share one call


def run_cpu(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all requests; see the argument record."""
    query, queries = query_rows(a)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = torch.full(query.shape[:2], float("inf"), dtype=torch.float32)
    reader = KeyReader.of(a)
    for chunk in chunks(a, queries, kv_side(a), _TILE_ELEMENTS):
        rows = chunk.rows.reshape(-1)
        if chunk.rows.shape[1] < _FOLD_BELOW and reads_in_place(a, chunk):
            part, part_lse = attend_in_place(a, chunk, query[rows])
        else:
            part, part_lse = _attend(a, chunk, query[rows], reader)
        out[rows] = part.to(out.dtype)
        lse[rows] = part_lse.float()
    return outputs(a, out, lse)


def _attend(
    a: Args, chunk: Chunk, query: torch.Tensor, reader: KeyReader
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (R*Lq, Nq, D) and lse (R*Lq, Nq) of one chunk; ``query`` is (R*Lq, Nq, D)."""
    count, query_len = chunk.rows.shape
    group, size = a.heads // a.kv_heads, a.head_dim
    query = query.view(count, query_len, a.kv_heads, group, size).permute(0, 2, 3, 1, 4)
    longest = int(chunk.kv_lens.max())
    step = max(_TILE_ELEMENTS // (count * a.kv_heads * size) // reader.unit, 1) * reader.unit
    total = _Total.empty(query, merging=longest > step)
    for first in range(0, longest, step):
        last = min(first + step, longest)
        key, value = reader.read(chunk.requests, chunk.kv_start, chunk.kv_lens, first, last)
        for top in range(0, query_len, _QUERY_TILE):
            rows = slice(top, min(top + _QUERY_TILE, query_len))
            _attend_tile(a, chunk, query, rows, (first, key, value), total)
    out, lse = total.result(a.sinks if a.has_sinks else None)
    out = out.permute(0, 3, 1, 2, 4).reshape(-1, a.heads, size)
    return out, lse.permute(0, 3, 1, 2).reshape(-1, a.heads)


def _attend_tile(
    a: Args,
    chunk: Chunk,
    query: torch.Tensor,
    rows: slice,
    tile: tuple[int, torch.Tensor, torch.Tensor],
    total: _Total,
) -> None:
    """Attention of some query rows over one key tile, added to ``total``."""
    first, key, value = tile
    low, high = visible_range(a, chunk, rows, first, first + key.shape[2])
    if low >= high:
        return
    seen = slice(low - first, high - first)
    hidden = hidden_keys(a, chunk, rows, low, high)
    mask = None
    if hidden is not None:
        zeros = torch.zeros(hidden.shape, dtype=query.dtype)
        mask = zeros.masked_fill_(hidden, float("-inf"))
    part = _flash(query[..., rows, :], key[:, :, seen], value[:, :, seen], mask, a.softmax_scale)
    empty = None if hidden is None else hidden.all(-1)[:, None, None]
    total.add(rows, *part, empty)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out like query and lse (R, KN, G, rows); query (R, KN, G, rows, D), mask (R, rows, keys).

    torch has no public function that returns the lse; this kernel is what its
    scaled_dot_product_attention runs on CPU.
    """
    group, rows = query.shape[2:4]
    if rows >= _FOLD_BELOW:
        masks = None if mask is None else mask[:, None]
        parts = [_kernel(query[:, :, g], key, value, masks, scale) for g in range(group)]
        outs, lses = zip(*parts, strict=True)
        return torch.stack(outs, 2), torch.stack(lses, 2)
    if mask is not None:
        mask = mask[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
    out, lse = _kernel(query.flatten(2, 3), key, value, mask, scale)
    return out.unflatten(2, (group, rows)), lse.unflatten(2, (group, rows))


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=scale
    )
    return out, lse


@attrs.frozen(eq=False)
class _Total:
    """Attention over the key tiles seen so far.

    Attributes:
        out: (R, KN, G, Lq, D) wide when tiles are merged, else in the dtype of the queries.
        lse: (R, KN, G, Lq) -inf where no key was seen.
        merging: Whether more than one key tile contributes to a row.
    """

    out: torch.Tensor
    lse: torch.Tensor
    merging: bool

    @classmethod
    def empty(cls, query: torch.Tensor, *, merging: bool) -> _Total:
        """Nothing seen yet."""
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(query.shape, dtype=wide if merging else query.dtype)
        return cls(out, torch.full(query.shape[:-1], float("-inf"), dtype=wide), merging)

    def add(
        self, rows: slice, out: torch.Tensor, lse: torch.Tensor, empty: torch.Tensor | None
    ) -> None:
        """Take in the attention of some rows over one tile; ``empty`` rows saw none of it."""
        if empty is not None:
            lse = lse.masked_fill(empty, float("-inf"))
            out = out.masked_fill(empty[..., None], 0.0)
        if not self.merging:
            self.out[..., rows, :] = out
            self.lse[..., rows] = lse
            return
        before = self.lse[..., rows]
        after = torch.logaddexp(before, lse)
        base = after.masked_fill(after.isneginf(), 0.0)
        old, new = ((part - base).exp()[..., None] for part in (before, lse))
        self.out[..., rows, :] = self.out[..., rows, :] * old + out * new
        self.lse[..., rows] = after

    def result(self, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse; rows without keys have out 0 and lse +inf, also with sinks."""
        return with_sinks(self.out, self.lse, sinks)
