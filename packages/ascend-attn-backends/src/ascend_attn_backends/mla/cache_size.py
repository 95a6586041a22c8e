"""How many bytes a token takes in the cache: latent rows against keys and values per head."""

from __future__ import annotations

import attrs
import torch

from ..errors import InvalidFieldError
from ..latent_layout import LATENT_SIZE, ROPE_SIZE


@attrs.frozen(kw_only=True)
class CacheBytesPerToken:
    """Bytes that one token takes in the caches of one layer.

    Attributes:
        mla: One latent and one rotary row, shared by all heads.
        gqa: Keys and values of ``num_kv_heads`` heads.
        mha: Keys and values of every query head.
        group: Key and value of one head.
    """

    mla: int
    gqa: int
    mha: int
    group: int

    @property
    def equivalent_kv_heads(self) -> float:
        """Key/value heads that grouped-query attention could keep in the bytes of the latents."""
        return self.mla / self.group


def cache_bytes_per_token(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    *,
    value_size: int | None = None,
    latent_size: int = LATENT_SIZE,
    rope_size: int = ROPE_SIZE,
) -> CacheBytesPerToken:
    """Cache bytes of one token and layer under three architectures.

    Multi-head attention keeps N keys and N values, grouped-query attention KN of each, latent
    attention ``latent_size + rope_size`` elements in all (DeepSeek-V2, arXiv 2405.04434, table 1).

    Args:
        num_heads: Query heads N.
        num_kv_heads: Key/value heads KN of the grouped-query attention to compare with.
        head_size: Elements of a key.
        dtype: dtype of the cache.
        value_size: Elements of a value; None means ``head_size``.
        latent_size: Elements of a latent row.
        rope_size: Elements of a rotary row.

    Raises:
        InvalidFieldError: A size is not positive, or N is not a multiple of KN.
    """
    value_size = head_size if value_size is None else value_size
    sizes = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "value_size": value_size,
        "latent_size": latent_size,
        "rope_size": rope_size,
    }
    for name, size in sizes.items():
        if size < 1:
            raise InvalidFieldError(name, size, "at least 1")
    if num_heads % num_kv_heads:
        raise InvalidFieldError("num_heads", num_heads, f"a multiple of {num_kv_heads}")
    group = (head_size + value_size) * dtype.itemsize
    return CacheBytesPerToken(
        mla=(latent_size + rope_size) * dtype.itemsize,
        gqa=num_kv_heads * group,
        mha=num_heads * group,
        group=group,
    )
