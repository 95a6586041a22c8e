"""Shapes and slot arithmetic of paged KV caches.

Every backend of this package takes a cache as a logical view
``[num_blocks, num_kv_heads, block_size, head_size]`` with free strides. The operators name two
layouts of the same values (op-plugin docs npu_fused_infer_attention_score, "PagedAttention"):
``BnNBsD`` is the logical view itself and ``BnBsH`` is ``[num_blocks, block_size,
num_kv_heads * head_size]``. Slots and element offsets are computed in 64 bits: a block id times a
page stride passes 2**31 in pools of a few GB.
"""

from __future__ import annotations

import enum

import attrs
import torch

from .errors import InvalidFieldError

PAD_SLOT = -1
"""Slot of a token that must not be written. The cache operators skip negative slots."""


@attrs.frozen
class PagedCacheShape:
    """Geometry of one layer's key cache or value cache.

    Attributes:
        num_blocks: Blocks in the pool.
        num_kv_heads: Key/value heads of the layer on this rank.
        block_size: Tokens per block.
        head_size: Elements per head.
    """

    num_blocks: int = attrs.field(validator=attrs.validators.ge(1))
    num_kv_heads: int = attrs.field(validator=attrs.validators.ge(1))
    block_size: int = attrs.field(validator=attrs.validators.ge(1))
    head_size: int = attrs.field(validator=attrs.validators.ge(1))

    @property
    def logical(self) -> tuple[int, int, int, int]:
        """``(num_blocks, num_kv_heads, block_size, head_size)``."""
        return (self.num_blocks, self.num_kv_heads, self.block_size, self.head_size)

    @property
    def num_slots(self) -> int:
        """Tokens that the cache can hold."""
        return self.num_blocks * self.block_size

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in one cache of ``dtype``."""
        return self.num_kv_heads * self.head_size * dtype.itemsize

    def allocate(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """A zeroed cache: the logical view over memory in token-major order.

        Token-major memory is what both operators take without a copy: ``scatter_pa_kv_cache`` in
        its ``Norm`` mode and the ``BnBsH`` layout of the attention operator.
        """
        memory = torch.zeros(
            (self.num_blocks, self.block_size, self.num_kv_heads, self.head_size),
            dtype=dtype,
            device=device,
        )
        return memory.transpose(1, 2)


class CacheContent(enum.Enum):
    """What the blocks of a cache hold."""

    TOKENS = "tokens"
    """Rows per token: keys and values, latents, index keys. Ranks share a request's tokens."""

    STATE = "state"
    """One state per request: Mamba and linear attention. A state is never divided."""


def blocks_per_rank(num_blocks: int, content: CacheContent, context_parallel_size: int) -> int:
    """Blocks of a pool or of a block row that one rank holds under context parallelism.

    Only blocks of tokens are shared between ranks. Each rank keeps every state block, so that a
    state's block id is good on each of them.

    Args:
        num_blocks: Blocks without context parallelism.
        content: What they hold.
        context_parallel_size: Ranks that share one request's tokens.

    Raises:
        InvalidFieldError: A count is out of range.
    """
    if num_blocks < 0:
        raise InvalidFieldError("num_blocks", num_blocks, "at least 0")
    if context_parallel_size < 1:
        raise InvalidFieldError("context_parallel_size", context_parallel_size, "at least 1")
    if content is CacheContent.STATE:
        return num_blocks
    return -(-num_blocks // context_parallel_size)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that ``num_tokens`` tokens occupy."""
    return -(-num_tokens // block_size)


def attention_view(cache: torch.Tensor) -> torch.Tensor:
    """The layout of a cache that the attention operator reads without a copy.

    Args:
        cache: ``[num_blocks, num_kv_heads, block_size, head_size]``, any strides.

    Returns:
        ``BnBsH`` (rank 3) when the memory is token-major, else the ``BnNBsD`` view (rank 4).
    """
    token_major = cache.transpose(1, 2)
    return token_major.flatten(2) if token_major.is_contiguous() else cache


def scatter_view(cache: torch.Tensor) -> torch.Tensor:
    """``[num_blocks, block_size, num_kv_heads, head_size]``, the ``Norm`` mode of the writer."""
    return cache.transpose(1, 2)


def blocks_are_dense(cache: torch.Tensor) -> bool:
    """Whether each block is one piece of memory in the order of its dimensions.

    Args:
        cache: ``[num_blocks, ...]``; the blocks may lie anywhere.
    """
    expected = 1
    for size, stride in zip(reversed(cache.shape[1:]), reversed(cache.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def slots_for_positions(
    block_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Cache slot of each token: ``block_table[row, pos // block_size] * block_size + pos % ...``.

    Args:
        block_table: ``[num_rows, max_blocks]`` int32 or int64 in host memory.
        rows: ``[num_tokens]`` int64, the request row of each token.
        positions: ``[num_tokens]`` int64, position of each token in its request, from 0.
        block_size: Tokens per block.

    Returns:
        ``[num_tokens]`` int64.

    Raises:
        InvalidFieldError: A position is negative or lies past the end of its block row; reading on
            would take the block of the next request.
    """
    columns = torch.div(positions.long(), block_size, rounding_mode="floor")
    width = block_table.shape[1]
    outside = ((columns < 0) | (columns >= width)).nonzero()
    if outside.numel():
        first = int(outside[0])
        raise InvalidFieldError(
            f"positions[{first}]",
            int(positions[first]),
            f"0 to {width * block_size - 1}, the {width} blocks of {block_size} tokens that "
            f"row {int(rows[first])} of block_table has",
        )
    blocks = block_table[rows.long(), columns].long()
    return blocks * block_size + torch.remainder(positions.long(), block_size)


def element_offsets(blocks: torch.Tensor, block_stride: int) -> torch.Tensor:
    """Offset of each block's first element from the start of the pool, in 64 bits.

    Args:
        blocks: Block ids, any integer dtype and shape.
        block_stride: Elements from one block to the next.

    Returns:
        int64, shape of ``blocks``.

    Raises:
        InvalidFieldError: The stride or the largest offset does not fit into 63 bits.
    """
    limit = 2**63 - 1
    largest = int(blocks.max()) if blocks.numel() else 0
    if not 0 <= block_stride <= limit or largest * block_stride > limit:
        raise InvalidFieldError(
            "block_stride", block_stride, f"at least 0, and {largest} * block_stride <= {limit}"
        )
    return blocks.long() * block_stride
