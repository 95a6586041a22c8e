"""Latent and rotary rows of all layers in host memory, and copies of whole blocks out of it."""

from __future__ import annotations

import attrs
import torch

from ..errors import InvalidFieldError
from ..latent_layout import SparseCacheShape
from ..paged_step import write_rows


@attrs.frozen(eq=False)
class HostKvStore:
    """The keys of every layer, in memory that is allocated once.

    Index rows are not here: every step scores all of them, so they stay on the device.

    Attributes:
        latent: ``[num_layers, num_blocks, 1, block_size, 512]``.
        rope: ``[num_layers, num_blocks, 1, block_size, 64]``.
    """

    latent: torch.Tensor
    rope: torch.Tensor

    @classmethod
    def allocate(
        cls,
        shape: SparseCacheShape,
        num_layers: int,
        dtype: torch.dtype,
        fetch_block_size: int | None = None,
    ) -> HostKvStore:
        """A zeroed store.

        Args:
            shape: Geometry of a layer's cache, in the blocks of the cache manager.
            num_layers: Layers.
            dtype: Of latents and rotary rows.
            fetch_block_size: Tokens that are fetched together; divides ``shape.block_size``. A
                smaller number fetches fewer tokens that nobody chose. None: the whole block.

        Raises:
            InvalidFieldError: No layers, or a fetch block that does not divide the block.
        """
        if num_layers < 1:
            raise InvalidFieldError("num_layers", num_layers, "at least 1")
        size = shape.block_size if fetch_block_size is None else fetch_block_size
        if size < 1 or shape.block_size % size:
            raise InvalidFieldError("fetch_block_size", size, f"a divisor of {shape.block_size}")
        pages = (num_layers, shape.num_blocks * (shape.block_size // size), 1, size)
        latent, rope = (
            torch.zeros((*pages, width), dtype=dtype)
            for width in (shape.latent_size, shape.rope_size)
        )
        return cls(latent, rope)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return self.latent.shape[0]

    @property
    def num_blocks(self) -> int:
        """Fetch blocks of each layer."""
        return self.latent.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens per fetch block."""
        return self.latent.shape[3]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one fetch block of one layer."""
        width = self.latent.shape[-1] + self.rope.shape[-1]
        return self.block_size * width * self.latent.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the store; they never grow."""
        return self.num_layers * self.num_blocks * self.bytes_per_block

    def write(
        self, layer: int, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write rows of a layer: ``[T, 512]`` and ``[T, 64]`` at ``[T]`` int64 slots, negative ones
        skipped.
        """
        write_rows(("latent", latent, self.latent[layer]), ("rope", rope, self.rope[layer]), slots)

    def copy_blocks(
        self,
        layer: int,
        blocks: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
    ) -> None:
        """Copy blocks of a layer into places of a pool.

        Args:
            layer: Whose blocks.
            blocks: ``[n]`` int64 fetch blocks.
            pool: Latent ``[capacity, 1, block_size, 512]`` and rotary part of the pool.
            slots: ``[n]`` int64 places in the pool.
        """
        for source, target in zip((self.latent[layer], self.rope[layer]), pool, strict=True):
            target.index_copy_(0, slots, source.index_select(0, blocks))
