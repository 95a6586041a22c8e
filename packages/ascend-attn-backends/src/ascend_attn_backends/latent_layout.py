"""Caches of sparse latent attention: latent, rotary and index rows, and views in kernel blocks.

A token leaves one latent row (512), one rotary row (64) and, in layers that have an indexer, one
index row (128): one key head each. Every cache is the logical view
``[num_blocks, 1, block_size, size]`` of :mod:`ascend_attn_backends.kv_layout`.
"""

from __future__ import annotations

import attrs
import torch

from .errors import InvalidFieldError
from .kv_layout import PagedCacheShape, scatter_view

LATENT_SIZE, ROPE_SIZE, INDEX_SIZE = 512, 64, 128
"""Elements of a cached row that the operators take (op-plugin docs npu_sparse_flash_attention,
npu_lightning_indexer)."""

KERNEL_BLOCK_MULTIPLE, KERNEL_BLOCK_MAX = 16, 1024
"""Blocks that both operators take (vllm-ascend sparse_flash_attention_tiling.cpp)."""


@attrs.frozen(kw_only=True)
class SparseCacheShape:
    """Geometry of the caches of one layer with sparse latent attention.

    Attributes:
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        latent_size: Elements of a latent row.
        rope_size: Elements of a rotary row.
        index_size: Elements of an index row.
        has_indexer: False in a layer that reuses the choice of another one: it has no index cache.
    """

    num_blocks: int = attrs.field(validator=attrs.validators.ge(1))
    block_size: int = attrs.field(validator=attrs.validators.ge(1))
    latent_size: int = attrs.field(default=LATENT_SIZE, validator=attrs.validators.ge(1))
    rope_size: int = attrs.field(default=ROPE_SIZE, validator=attrs.validators.ge(1))
    index_size: int = attrs.field(default=INDEX_SIZE, validator=attrs.validators.ge(1))
    has_indexer: bool = True

    @property
    def latent(self) -> PagedCacheShape:
        """Geometry of the latent cache."""
        return self._cache(self.latent_size)

    @property
    def rope(self) -> PagedCacheShape:
        """Geometry of the rotary cache."""
        return self._cache(self.rope_size)

    @property
    def index(self) -> PagedCacheShape | None:
        """Geometry of the index cache, or None."""
        return self._cache(self.index_size) if self.has_indexer else None

    def _cache(self, size: int) -> PagedCacheShape:
        return PagedCacheShape(self.num_blocks, 1, self.block_size, size)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in all caches of the layer."""
        index = self.index_size if self.has_indexer else 0
        return (self.latent_size + self.rope_size + index) * dtype.itemsize

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all caches of the layer; Python integers, so pools of any size are exact."""
        return self.num_blocks * self.block_size * self.bytes_per_token(dtype)


def kernel_block_size_for(block_size: int) -> int:
    """The largest block that the operators take and that divides a logical block.

    Args:
        block_size: Tokens per logical block, what the cache manager hands out.

    Raises:
        InvalidFieldError: The logical block is not a multiple of 16 tokens.
    """
    if block_size < 1 or block_size % KERNEL_BLOCK_MULTIPLE:
        raise InvalidFieldError("block_size", block_size, f"a multiple of {KERNEL_BLOCK_MULTIPLE}")
    largest = min(block_size, KERNEL_BLOCK_MAX)
    return next(
        size
        for size in range(largest - largest % KERNEL_BLOCK_MULTIPLE, 0, -KERNEL_BLOCK_MULTIPLE)
        if block_size % size == 0
    )


def kernel_block_table(block_table: torch.Tensor, blocks_per_block: int) -> torch.Tensor:
    """A block table in kernel blocks: logical block b is the kernel blocks b * r up to b * r + r.

    Args:
        block_table: ``[num_rows, max_blocks]`` int32.
        blocks_per_block: Kernel blocks r per logical block.

    Returns:
        ``[num_rows, max_blocks * r]`` int32, a copy, on the same device. Nothing is read back.
    """
    inner = torch.arange(blocks_per_block, dtype=block_table.dtype, device=block_table.device)
    return (block_table[..., None] * blocks_per_block + inner).flatten(1)


def kernel_view(name: str, cache: torch.Tensor, kernel_block_size: int) -> torch.Tensor:
    """``[num_kernel_blocks, kernel_block_size, 1, size]``: what the operators read, never a copy.

    Args:
        name: Name of the cache, for the error.
        cache: ``[num_blocks, 1, block_size, size]`` view.
        kernel_block_size: Tokens per kernel block; divides block_size.

    Raises:
        InvalidFieldError: The memory between two blocks is not that of the tokens alone, so that
            parts of a block are not equally far apart.
    """
    blocks = scatter_view(cache)
    size = blocks.shape[1]
    if size == kernel_block_size:
        return blocks
    if blocks.stride(0) != size * blocks.stride(1):
        raise InvalidFieldError(
            name,
            f"strides {list(blocks.stride())} of [num_blocks, block_size, 1, size]",
            f"blocks {size} tokens apart, to be seen as blocks of {kernel_block_size}",
        )
    rows, step = blocks.shape[0] * size // kernel_block_size, blocks.stride(1)
    strides = (kernel_block_size * step, step, blocks.stride(2), blocks.stride(3))
    return blocks.as_strided((rows, kernel_block_size, *blocks.shape[2:]), strides)
