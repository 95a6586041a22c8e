"""One normal form of every layout for the host providers: query rows and stores of keys."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from .call import TREE_MODE, Call
from .outputs import output_metas
from .stores import PagedStore, RowStore

Store = PagedStore | RowStore
_TO_BSND: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "BSH": lambda t, heads: t.unflatten(2, (heads, -1)),
    "BSND": lambda t, heads: t,
    "BNSD": lambda t, heads: t.transpose(1, 2),
    "TND": lambda t, heads: t[None],
    "NTD": lambda t, heads: t.transpose(0, 1)[None],
}
_FROM_BSND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "BSH": lambda t: t.flatten(2),
    "BSND": lambda t: t,
    "BNSD": lambda t: t.transpose(1, 2).contiguous(),
    "NBSD": lambda t: t.permute(2, 0, 1, 3).contiguous(),
    "TND": lambda t: t[0],
    "NTD": lambda t: t[0].transpose(0, 1).contiguous(),
}


@attrs.frozen
class Span:
    """One request.

    Attributes:
        request: Its number.
        start: First query row.
        q_len: Lq.
        kv_len: Lkv, shared prefix included.
    """

    request: int
    start: int
    q_len: int
    kv_len: int


@attrs.frozen(eq=False)
class Problem:
    """A call on token rows.

    Attributes:
        call: The call.
        query: (rows, N, D or D + rope) of all requests, padding rows included.
        spans: The requests.
        keys: Stores whose parts side by side are the keys: latent and rope, or keys alone.
        values: Store of the values.
        value_size: Head size of the values.
        full_mask: bool (1 or B, S, KS) where the mode reads a full mask.
    """

    call: Call
    query: torch.Tensor
    spans: tuple[Span, ...]
    keys: tuple[Store, ...]
    values: Store
    value_size: int
    full_mask: torch.Tensor | None

    def outputs(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs in the output layout from out (rows, N, VD) and lse (rows, N)."""
        call = self.call
        meta, lse_meta = output_metas(call)
        batch = 1 if call.packed else call.q.batch
        shaped = out.view(batch, -1, *out.shape[1:])
        laid_out = _FROM_BSND[call.target](shaped).to(meta.dtype)
        if not call.lse:
            return laid_out, lse.new_empty(0)
        rows = lse if call.packed else lse.view(batch, -1, call.heads).transpose(1, 2)
        return laid_out, rows.reshape(lse_meta.shape).contiguous()


def host_gap(c: Call) -> str | None:
    """What the host providers do not implement, with the reason."""
    scales = (c.key_scale, c.value_scale, c.pair_scale, c.query_scale, c.out_scale, c.out_offset)
    quantised = c.query.dtype == torch.int8 or c.int8_keys or c.other_quant
    if quantised or any(scale is not None for scale in scales):
        return "quantised arithmetic: the documents give no exact rounding to reproduce"
    if c.mode == TREE_MODE:
        return "tree masks: the documents give the mask's shape, not its meaning for older keys"
    padded = any(size is not None for size in c.padding)
    if padded and (c.mask is not None or c.pse is not None):
        return "masks and shifts of left-padded rows: the documents do not say their alignment"
    return None


def problem(c: Call) -> Problem:
    """The normal form of a legal call."""
    query = with_rope(rows(c.query, c.base, c.heads), c.query_rope, c)
    spans, key_starts = spans_of(c)
    if c.paged:
        keys, values = _paged(c, spans)
    else:
        keys, values = _unpaged(c, spans, key_starts)
    return Problem(c, query, tuple(spans), keys, values, c.value_size, full_mask(c))


def rows(tensor: torch.Tensor, base: str, heads: int) -> torch.Tensor:
    """(rows, heads, size) of a tensor in layout ``base``; a view where strides allow it."""
    return _TO_BSND[base](tensor, heads).flatten(0, 1)


def with_rope(query: torch.Tensor, rope: torch.Tensor | None, c: Call) -> torch.Tensor:
    """Query rows (rows, N, D) with their rotary parts behind them, where there are any."""
    if rope is None:
        return query
    return torch.cat([query, rope if c.layout == "TND" else rows(rope, c.base, c.heads)], -1)


def spans_of(c: Call) -> tuple[list[Span], list[int]]:
    """Requests, and the first key row of each (meaningful for unpaged keys)."""
    prefix = 0
    if c.prefix[0] is not None:
        prefix = c.prefix_lens[0] if c.prefix_lens else c.key_shape(c.prefix[0]).length
    if c.packed:
        return _packed_spans(c)
    lengths = c.lengths(c.q_lens, c.q.length)
    rooms = _key_rooms(c)
    kv_lens = [
        min(n, room) for n, room in zip(c.lengths(c.kv_lens, max(rooms)), rooms, strict=True)
    ]
    query_pad, key_pad = (0 if size is None else int(size) for size in c.padding)
    spans, starts, first_key = [], [], 0
    for request, (q_len, kv_len) in enumerate(zip(lengths, kv_lens, strict=True)):
        skipped = c.q.length - query_pad - q_len if c.padding[0] is not None else 0
        left_out = rooms[request] - key_pad - kv_len if c.padding[1] is not None else 0
        if min(skipped, left_out) < 0:  # documented: the output of such a request is zero
            q_len = skipped = left_out = 0
        start = request * c.q.length + skipped
        spans.append(Span(request, start, q_len, kv_len + prefix))
        starts.append(first_key + left_out)
        first_key += rooms[request]
    return spans, starts


def _key_rooms(c: Call) -> list[int]:
    """Rows of keys that each request owns."""
    if c.block_table is not None:
        return [c.block_table.shape[1] * c.block_size] * c.q.batch
    if isinstance(c.key, torch.Tensor):
        return [c.k.length] * c.q.batch
    return [c.key_shape(entry).length for entry in c.key]


def _packed_spans(c: Call) -> tuple[list[Span], list[int]]:
    ends, key_ends = c.q_lens or (), c.kv_lens or ()
    starts = (0, *ends[:-1])
    key_starts = [0, *key_ends[:-1]]
    kv_lens = key_ends if c.paged else [e - s for s, e in zip(key_starts, key_ends, strict=True)]
    numbered = enumerate(zip(starts, ends, kv_lens, strict=True))
    return [Span(i, start, end - start, n) for i, (start, end, n) in numbered], key_starts


def _paged(c: Call, spans: list[Span]) -> tuple[tuple[Store, ...], Store]:
    lengths = torch.tensor([span.kv_len for span in spans], dtype=torch.long)
    used = lengths.add(c.block_size - 1).div(c.block_size, rounding_mode="floor")
    assert c.block_table is not None  # noqa: S101 - the caller branched on it

    def store(cache: torch.Tensor) -> PagedStore:
        return PagedStore(cache, c.block_table, used, c.block_size)  # type: ignore[arg-type] # checked above

    keys = tuple(map(store, block_caches(c, c.first_key, c.key_rope)))
    return keys, store(*block_caches(c, c.first_value))


def block_caches(c: Call, *parts: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Paged caches as (num_blocks, KN, block_size, size) or NZ, without those that are None."""
    return tuple(
        part if part.dim() > 3 else part.unflatten(2, (c.kv_heads, -1)).transpose(1, 2)
        for part in parts
        if part is not None
    )


def _unpaged(c: Call, spans: list[Span], starts: list[int]) -> tuple[tuple[Store, ...], Store]:
    firsts = torch.tensor(starts, dtype=torch.long)

    def store(tensors: torch.Tensor | tuple[torch.Tensor, ...]) -> RowStore:
        parts = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        owned = [rows(part, c.base, c.kv_heads) for part in parts]
        return RowStore(owned[0] if len(owned) == 1 else torch.cat(owned), firsts)

    keys = tuple(store(part) for part in ((c.key,) if c.key_rope is None else (c.key, c.key_rope)))
    values = store(c.value)
    if c.prefix[0] is None or c.prefix[1] is None:
        return keys, values
    return (_prefixed(c, keys[0], c.prefix[0], spans),), _prefixed(c, values, c.prefix[1], spans)


def _prefixed(c: Call, store: RowStore, prefix: torch.Tensor, spans: list[Span]) -> RowStore:
    """The store with the shared prefix in front of every request."""
    shared = rows(prefix, c.base, c.kv_heads)
    length = c.prefix_lens[0] if c.prefix_lens else len(shared)
    parts, starts, total = [], [], 0
    for span, first in zip(spans, store.starts.tolist(), strict=True):
        parts += [shared[:length], store.rows[first : first + span.kv_len - length]]
        starts.append(total)
        total += span.kv_len
    return RowStore(torch.cat(parts), torch.tensor(starts))


def full_mask(c: Call) -> torch.Tensor | None:
    """bool (1 or B, S, KS): True hides the key."""
    if c.mask is None or c.effective_mode not in (0, 1) or c.packed:
        return None
    mask = c.mask.bool()
    if mask.dim() == 2:
        return mask[:, None] if c.single and mask.shape[0] == c.q.batch else mask[None]
    return mask.flatten(0, -3) if mask.dim() == 4 else mask
