"""Writing one row per token into a cache of one head."""

from __future__ import annotations

import torch


def write_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, nz: bool) -> None:
    """Write ``rows`` (T, D) to ``slots`` (T,); negative slots are skipped.

    Args:
        cache: (num_blocks, block_size, 1, D); with ``nz`` a block is stored in the order
            (D / L, block_size, L), L = 32 / itemsize, under that same shape.
        rows: Converted to the dtype of the cache.
        slots: int64, ``block, offset = divmod(slot, block_size)``.
        nz: Whether the blocks are in FRACTAL_NZ order.
    """
    blocks, block_size, _, size = cache.shape
    kept = slots >= 0
    new = rows.to(cache.dtype)[kept]
    if not new.numel() or not cache.numel():
        return
    block, offset = slots[kept] // block_size, slots[kept] % block_size
    if not nz:
        cache[block, offset, 0] = new
        return
    inner = 32 // cache.element_size()
    pieces = cache.view(blocks, size // inner, block_size, inner)
    pieces.transpose(1, 2)[block, offset] = new.view(len(new), size // inner, inner)
