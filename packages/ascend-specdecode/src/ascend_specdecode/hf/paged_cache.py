"""A pool of cache blocks: sequences take blocks as they grow and give them back by length."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_attn_backends import AscendAttentionBackend, AscendSFABackend
from ascend_specdecode.arguments import check_integer
from ascend_specdecode.errors import TargetError


class BlockPool:
    """Blocks of a cache by number: who has which.

    Args:
        num_tokens: how many tokens fit, rounded up to whole blocks.
        block_size: tokens per block.

    Raises:
        ArgumentError: a count is below 1.
    """

    def __init__(self, num_tokens: int, block_size: int = 16) -> None:
        for name, value in (("num_tokens", num_tokens), ("block_size", block_size)):
            check_integer(name, value, least=1)
        self.block_size = block_size
        self.num_blocks = -(-num_tokens // block_size)
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._blocks: dict[int, list[int]] = {}

    @property
    def free_tokens(self) -> int:
        """Tokens that still fit into free blocks."""
        return len(self._free) * self.block_size

    @property
    def sequences(self) -> frozenset[int]:
        """Sequences that hold blocks."""
        return frozenset(self._blocks)

    def reserve(self, lengths: dict[int, int]) -> None:
        """Give each sequence id the blocks for its length in tokens.

        Raises:
            TargetError: the pool is too small; names the sequences without blocks, the others got
                theirs.
        """
        starved = []
        for sequence_id, length in lengths.items():
            blocks = self._blocks.get(sequence_id, [])
            missing = -(-length // self.block_size) - len(blocks)
            if missing > len(self._free):
                starved.append(sequence_id)
            elif missing > 0:
                self._blocks[sequence_id] = blocks + [self._free.pop() for _ in range(missing)]
        if starved:
            message = f"no free cache block of {self.num_blocks} x {self.block_size} tokens"
            raise TargetError(message, starved)

    def keep(self, sequence_id: int, length: int) -> None:
        """Give back the blocks of a sequence beyond its first ``length`` tokens."""
        blocks = self._blocks.get(sequence_id)
        if blocks is None:
            return
        kept = -(-length // self.block_size)
        self._free.extend(reversed(blocks[kept:]))
        del blocks[kept:]
        if not blocks:
            del self._blocks[sequence_id]

    def table(self, sequence_ids: Sequence[int]) -> torch.Tensor:
        """Block ids [len(sequence_ids), widest] int32; unused columns are 0."""
        rows = [self._blocks.get(sequence_id, []) for sequence_id in sequence_ids]
        table = torch.zeros((len(rows), max([1, *map(len, rows)])), dtype=torch.int32)
        for row, blocks in zip(table, rows, strict=True):
            row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return table


class PagedCache(BlockPool):
    """Keys and values of all layers, in blocks that sequences share out among them.

    Args:
        num_layers: layers of the model.
        num_kv_heads: key/value heads KN of a layer.
        head_size: elements D per head.
        num_tokens: how many tokens fit, rounded up to whole blocks.
        block_size: tokens per block.
        dtype: dtype of the cache.

    Raises:
        ArgumentError: a count is below 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        num_tokens: int,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(num_tokens, block_size)
        shape = AscendAttentionBackend.cache_shape(
            self.num_blocks, block_size, num_kv_heads, head_size
        )
        self.layers = [(shape.allocate(dtype), shape.allocate(dtype)) for _ in range(num_layers)]


class SparseCache(BlockPool):
    """Latents, rotary keys and index keys of all layers, in blocks.

    Args:
        num_layers: layers of the model.
        num_tokens: how many tokens fit, rounded up to whole blocks.
        block_size: tokens per block.
        dtype: dtype of the cache.

    Raises:
        ArgumentError: a count is below 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_tokens: int,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(num_tokens, block_size)
        shape = AscendSFABackend.cache_shape(self.num_blocks, block_size)
        index = shape.index
        assert index is not None  # noqa: S101 - every layer has one, used or not
        kinds = (shape.latent, shape.rope, index)
        self.layers = [tuple(kind.allocate(dtype) for kind in kinds) for _ in range(num_layers)]
