"""Unmasked and causal attention by torch's flash kernel for CPU tensors.

A causal request splits into keys that all its rows see, and the square of its own last keys; the
kernel's lse merges the two and the tiles of the first. Keys are gathered tile by tile, small enough
to stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from .pieces import Bucket, cleared
from .problem import Problem, Span

_TILE_ELEMENTS = 1 << 19  # elements of one tile of keys: 2 MiB in float32
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def takes_flash(p: Problem, span: Span) -> bool:
    """Whether a request is plain or causal attention with one head size.

    The kernel's causal form hides keys before it scales: a scale of 0 or less makes them NaN or
    +inf.
    """
    call = p.call
    if call.pse is not None or p.full_mask is not None or len(p.keys) != 1:
        return False
    if p.query.shape[-1] != p.value_size:
        return False
    if call.effective_mode == 3:
        return span.kv_len >= span.q_len and call.scale > 0
    return call.effective_mode == 0


def requests_together(p: Problem) -> int:
    """How many requests share a tile of one block each."""
    return max(_TILE_ELEMENTS // (p.call.kv_heads * p.value_size * p.keys[0].unit), 1)


def attend_flash(p: Problem, b: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [R, N, n, VD] and lse [R, N, n]; every row has a key."""
    causal = p.call.effective_mode == 3 and b.count > 1
    seen_by_all = b.ends if causal else b.kv_lens
    wide = torch.promote_types(p.query.dtype, torch.float32)  # the kernel would round weights
    query = p.query[b.rows].transpose(1, 2).to(wide)
    if b.count == 1:  # query heads of one key head become rows of one product
        query = query.reshape(b.size, p.call.kv_heads, -1, query.shape[-1])
    merged = _Merged()
    for first, last in _tiles(p, b, int(seen_by_all.max())):
        stores = (p.keys[0], p.values)
        key, value = (store.gather(b.requests, first, last).to(wide) for store in stores)
        merged.add(*_tile(p, query, key, value, seen_by_all - first))
    if causal:
        positions = b.ends[:, None] + torch.arange(b.count)
        own = (store.tokens(b.requests, positions) for store in (p.keys[0], p.values))
        key, value = (rows.transpose(1, 2).to(wide) for rows in own)
        merged.add(*_flash(query, key, value, 0.0, True, scale=p.call.scale))
    shape = (b.size, p.call.heads, b.count)
    return merged.out.reshape(*shape, p.value_size), merged.lse.reshape(shape)


def _tiles(p: Problem, b: Bucket, length: int) -> Iterator[tuple[int, int]]:
    """Ranges of key positions, in whole blocks."""
    unit = p.keys[0].unit
    per_token = b.size * p.call.kv_heads * p.value_size
    step = max(_TILE_ELEMENTS // per_token // unit, 1) * unit
    for first in range(0, length, step):
        yield first, min(first + step, -(-length // unit) * unit)


def _tile(
    p: Problem, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the first ``seen`` keys of a tile; lse -inf where that is none."""
    count = int(seen.clamp(max=key.shape[2]).max())
    key, value = key[:, :, :count], value[:, :, :count]
    if bool((seen >= count).all()):
        out, lse = _flash(query, key, value, 0.0, False, scale=p.call.scale)
        return out, lse
    hidden = torch.arange(count) >= seen[:, None]
    key, value = (cleared(rows, hidden) for rows in (key, value))
    mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
    shape = (*query.shape[:3], count)
    mask = mask[:, None, None].expand(shape)
    out, lse = _flash(query, key, value, 0.0, False, attn_mask=mask, scale=p.call.scale)
    none = (seen <= 0)[:, None, None]
    return out.masked_fill(none[..., None], 0.0), lse.masked_fill(none, float("-inf"))


@attrs.define(eq=False)
class _Merged:
    """Attention over the parts so far, in float32 or wider."""

    _out: torch.Tensor | None = None
    _lse: torch.Tensor | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take in the outputs [..., D] and lse [...] of further keys."""
        if self._out is None or self._lse is None:
            self._out, self._lse = out, lse
            return
        total = torch.logaddexp(self._lse, lse)
        old, new = ((part - total).exp_()[..., None] for part in (self._lse, lse))
        self._out = (self._out * old).addcmul_(out.to(old.dtype), new)
        self._lse = total

    @property
    def out(self) -> torch.Tensor:
        """Merged outputs."""
        assert self._out is not None  # noqa: S101 - a bucket has keys
        return self._out

    @property
    def lse(self) -> torch.Tensor:
        """Merged lse."""
        assert self._lse is not None  # noqa: S101 - a bucket has keys
        return self._lse
