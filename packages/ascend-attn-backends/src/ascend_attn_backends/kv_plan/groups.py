"""One kind of cache of a DeepSeek-V4 model: its blocks, what a request keeps in it, its tensor."""

from __future__ import annotations

from math import gcd

import attrs
import torch

from ..dsa import CompressorStateShape, DsaCompression
from ..kv_layout import PagedCacheShape, num_blocks_for

WINDOW, COMPRESSED, INDEX, STATE, INDEX_STATE = (
    "window",
    "compressed",
    "index",
    "state",
    "index_state",
)
STATES = (STATE, INDEX_STATE)


@attrs.frozen(kw_only=True)
class DsaCacheGroup:
    """A cache that some layers keep, each in a tensor of its own, with one block table for all.

    Attributes:
        cache: ``"window"``, ``"compressed"``, ``"index"``, ``"state"`` or ``"index_state"``.
        layers: Numbers of the layers.
        compression: Of the layers; None in the group of the window, which all layers have.
        rows_per_block: Rows of a block. A row is a token, or a compressed key.
        row_size: Elements of a row; of a state, those of values and scores together.
        dtype: dtype of the rows.
        window: Keys of the sliding window.
        num_spec_tokens: Drafts that may be taken back.
    """

    cache: str
    layers: tuple[int, ...]
    compression: DsaCompression | None
    rows_per_block: int
    row_size: int
    dtype: torch.dtype
    window: int
    num_spec_tokens: int

    @property
    def name(self) -> str:
        """``"compressed/4"``: the cache and its ratio; ``"window"``."""
        return self.cache if self.compression is None else f"{self.cache}/{self.compression.ratio}"

    @property
    def grows(self) -> bool:
        """Whether a request keeps every row as long as it lives."""
        return self.cache in (COMPRESSED, INDEX)

    @property
    def tokens_per_row(self) -> int:
        """Tokens that a row stands for."""
        return self.compression.ratio if self.grows and self.compression is not None else 1

    @property
    def tokens_per_block(self) -> int:
        """Tokens that a block stands for; what a cache manager counts in."""
        return self.tokens_per_row * self.rows_per_block

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in one layer."""
        return self.row_size * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in one layer."""
        return self.rows_per_block * self.row_bytes

    @property
    def null_blocks(self) -> int:
        """Blocks of the pool that no request may have: block 0 of the states."""
        return 1 if self.cache in STATES else 0

    def rows(self, length: int) -> int:
        """Rows that the next step still reads behind ``length`` tokens."""
        if self.grows:
            return length // self.tokens_per_row
        return length - self._first_read(length)

    def columns(self, start: int, end: int) -> list[int]:
        """Columns of the block table that a step with the tokens ``start`` up to ``end`` needs.

        The others may be freed, or never be allocated: rows of old tokens are not read again, and
        in the states also not the middle of a long step, whose columns then hold block 0.
        """
        if self.grows:
            return list(range(num_blocks_for(end // self.tokens_per_row, self.rows_per_block)))
        spans = [(self._first_read(start), end)]
        if self.cache in STATES and end - start > self.num_spec_tokens + 1:
            spans = [(self._first_read(start), start), (max(self._first_read(end), start), end)]
        size = self.rows_per_block
        blocks = {
            block
            for first, last in spans
            if first < last
            for block in range(first // size, (last - 1) // size + 1)
        }
        return sorted(blocks)

    def max_blocks(self, length: int, step_tokens: int) -> int:
        """Most blocks of a request with up to ``length`` tokens in steps of up to ``step_tokens``.

        A bound that holds wherever the blocks begin; never more than the whole request takes.
        """
        whole = num_blocks_for(length // self.tokens_per_row, self.rows_per_block)
        if self.grows:
            return whole
        kept = self._most_kept
        if self.cache in STATES and step_tokens > self.num_spec_tokens + 1:
            return min(whole, self._span(kept + step_tokens), 2 * self._span(kept))
        return min(whole, self._span(kept + step_tokens))

    def allocate(
        self, num_blocks: int, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of one layer in a pool of ``num_blocks``: the cache, or the two states."""
        rows, size = self.rows_per_block, self.row_size
        if self.cache in STATES:
            shape = CompressorStateShape(num_blocks=num_blocks, block_size=rows, width=size // 2)
            return shape.allocate(device)
        return (PagedCacheShape(num_blocks, 1, rows, size).allocate(self.dtype, device),)

    @property
    def _most_kept(self) -> int:
        """Most tokens before a step that it reads."""
        if self.compression is None:
            return self.window - 1
        return self.compression.coff * self.compression.ratio - 1

    def _first_read(self, start: int) -> int:
        if self.compression is None:
            return max(start - self.window + 1, 0)
        return self.compression.first_needed(start)

    def _span(self, tokens: int) -> int:
        """Most blocks that consecutive tokens lie in; those of a state begin with a group."""
        step = 1 if self.compression is None else gcd(self.compression.ratio, self.rows_per_block)
        return num_blocks_for(self.rows_per_block - step + tokens, self.rows_per_block)
