"""What every layer over a paged latent cache shares: geometry and cache writes."""

from __future__ import annotations

import torch

from .errors import InvalidFieldError
from .latent_layout import LATENT_SIZE, ROPE_SIZE
from .paged_step import Writing, write_rows


class LatentLayer:
    """Geometry of one layer with absorbed latent attention.

    Queries arrive absorbed (the nope part multiplied by the key half of the latent up-projection)
    and rotated, results leave as latents, to be multiplied by its value half.

    Args:
        num_heads: Query heads N of the layer on this rank.
        scale: Factor on the 576-wide scores. It is that of the layer before absorption, usually
            ``(nope + rope) ** -0.5``; the operator has no useful default.
        latent_size: Elements of a latent row; products take 512.
        rope_size: Elements of a rotary row; products take 64.

    Raises:
        InvalidFieldError: A count is not positive.
    """

    def __init__(
        self,
        num_heads: int,
        scale: float,
        latent_size: int = LATENT_SIZE,
        rope_size: int = ROPE_SIZE,
    ) -> None:
        sizes = {"num_heads": num_heads, "latent_size": latent_size, "rope_size": rope_size}
        for name, value in sizes.items():
            if value < 1:
                raise InvalidFieldError(name, value, "at least 1")
        self.num_heads, self.scale = num_heads, float(scale)
        self.latent_size, self.rope_size = latent_size, rope_size
        self._writing = Writing()

    def write_kv(
        self,
        latent: torch.Tensor,
        rope: torch.Tensor,
        latent_cache: torch.Tensor,
        rope_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's latent and rotary rows into the caches, in place.

        Args:
            latent: ``[T, 512]`` normalised latents, T at least ``num_token_rows``.
            rope: ``[T, 64]`` rotated keys.
            latent_cache: ``[num_blocks, 1, block_size, 512]`` view; a product wants it contiguous.
            rope_cache: ``[num_blocks, 1, block_size, 64]`` view.
            slot_mapping: ``[num_token_rows]`` int64; tokens with a negative slot are skipped.

        Raises:
            InvalidFieldError: Fewer rows than slots.
            ascend_attn_ops.OpArgumentError: Shapes or dtypes break the operator's contract.
        """
        first, second = ("latent", latent, latent_cache), ("rope", rope, rope_cache)
        write_rows(first, second, slot_mapping, self._writing)
