"""Caches of one DeepSeek-V4 layer: window, compressed keys, index keys, compressor states."""

from __future__ import annotations

import attrs
import torch

from ..kv_layout import PagedCacheShape
from .compression import INDEX_SIZE, KEY_SIZE, DsaCompression

NULL_STATE_BLOCK = 0
"""Block of a state cache that is nobody's: a table entry of 0 tells the compressor not to write
(ops-transformer docs compressor)."""


@attrs.frozen(kw_only=True)
class CompressorStateShape:
    """Geometry of the two states of one compressor: values and scores of recent tokens, float32.

    Attributes:
        num_blocks: Blocks in the pool; block 0 holds no state.
        block_size: Tokens per block.
        width: Channels of a token, ``coff * size of a key``.
    """

    num_blocks: int = attrs.field(validator=attrs.validators.ge(1))
    block_size: int = attrs.field(validator=attrs.validators.ge(1))
    width: int = attrs.field(validator=attrs.validators.ge(1))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in both states."""
        return 2 * self.width * torch.float32.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of both states."""
        return self.num_blocks * self.block_size * self.bytes_per_token

    def allocate(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """(kv_state, score_state), each ``[num_blocks, block_size, width]`` float32 of zeros."""
        shape = (self.num_blocks, self.block_size, self.width)
        kv_state, score_state = (torch.zeros(shape, device=device) for _ in range(2))
        return kv_state, score_state


@attrs.frozen(kw_only=True)
class DsaCacheShape:
    """Geometry of the caches of one layer; what the layer does not keep is None.

    Attributes:
        window: Keys of the sliding window, one row per token.
        compressed: Compressed keys, one row per ``ratio`` tokens.
        index: Index keys, beside the compressed keys.
        state: State of the compressor.
        index_state: State of the indexer's own compressor.
    """

    window: PagedCacheShape
    compressed: PagedCacheShape | None = None
    index: PagedCacheShape | None = None
    state: CompressorStateShape | None = None
    index_state: CompressorStateShape | None = None

    @classmethod
    def of_layer(
        cls,
        num_blocks: int,
        block_size: int,
        compression: DsaCompression | None,
        *,
        state_block_size: int | None = None,
        key_size: int = KEY_SIZE,
        index_size: int = INDEX_SIZE,
    ) -> DsaCacheShape:
        """Pools of ``num_blocks`` blocks each.

        Args:
            num_blocks: Blocks per pool.
            block_size: Rows per block of the window, compressed and index cache.
            compression: Of the layer; None for one with a sliding window alone.
            state_block_size: Tokens per block of the states; None means ``block_size``.
            key_size: Elements of a key; products take 512.
            index_size: Elements of an index key; products take 128.
        """
        rows = PagedCacheShape(num_blocks, 1, block_size, key_size)
        if compression is None:
            return cls(window=rows)
        tokens = block_size if state_block_size is None else state_block_size

        def state(size: int) -> CompressorStateShape:
            width = compression.coff * size
            return CompressorStateShape(num_blocks=num_blocks, block_size=tokens, width=width)

        if compression.top_k is None:
            return cls(window=rows, compressed=rows, state=state(key_size))
        return cls(
            window=rows,
            compressed=rows,
            index=attrs.evolve(rows, head_size=index_size),
            state=state(key_size),
            index_state=state(index_size),
        )
