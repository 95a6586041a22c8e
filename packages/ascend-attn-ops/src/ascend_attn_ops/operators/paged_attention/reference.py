"""The formula, row by row, in float32."""

from __future__ import annotations

import torch

from .arguments import PagedAttentionArguments as Args


def run_reference(a: Args) -> None:
    """Fill ``out``; see the argument record."""
    for row, length in enumerate(a.context_lens.tolist()):
        if length <= 0:
            a.out[row] = 0
            continue
        group = a.num_heads // a.num_kv_heads
        key = _rows(a, a.key_cache, row, length).repeat_interleave(group, 1)
        value = _rows(a, a.value_cache, row, length).repeat_interleave(group, 1)
        scores = torch.einsum("hd,khd->hk", a.query[row].float(), key) * a.scale_value
        a.out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), value).to(a.out.dtype)


def _rows(a: Args, cache: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """Keys or values (length, KN, D) of one request in float32."""
    blocks = a.block_table[row, : -(-length // a.block_size)].long()
    pages = cache[blocks].float()
    if not a.is_nd:
        pages = pages.transpose(1, 2).flatten(2)
        size = (a.query if cache is a.key_cache else a.out).shape[2]
        pages = pages[..., : a.num_kv_heads * size].unflatten(2, (a.num_kv_heads, size))
    return pages.flatten(0, 1)[:length]
