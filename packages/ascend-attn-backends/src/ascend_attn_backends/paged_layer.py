"""What layers over a paged key/value cache share: their geometry, and writing the cache."""

from __future__ import annotations

from typing import Protocol

import torch

from ascend_attn_ops import scatter_pa_kv_cache

from .errors import InvalidFieldError
from .masks import MaskMode
from .paged_step import Writing, norm_mode


class StepCounts(Protocol):
    """The counts of a step's metadata that a layer compares its tensors with."""

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to a request."""

    @property
    def block_size(self) -> int:
        """Tokens per cache block."""


class PagedAttentionLayer:
    """Geometry of one layer, and the writing of its cache.

    Args:
        num_heads: Query heads N of the layer on this rank.
        head_size: Elements per head D.
        scale: Factor on the scores, usually ``head_size ** -0.5``. The operator has no useful
            default, so it must be given.
        num_kv_heads: Key/value heads KN; None means N.
        sliding_window: Keys that a token sees, its own included; None means all.

    Raises:
        InvalidFieldError: A count is not positive, or N is not a multiple of KN.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        sliding_window: int | None = None,
    ) -> None:
        self.num_heads = _positive("num_heads", num_heads)
        self.head_size = _positive("head_size", head_size)
        self.num_kv_heads = _positive(
            "num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads
        )
        if num_heads % self.num_kv_heads:
            raise InvalidFieldError("num_heads", num_heads, f"a multiple of {self.num_kv_heads}")
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self._writing = Writing()
        self._modes = {
            causal: MaskMode.for_window(sliding_window, causal=causal) for causal in (True, False)
        }

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's keys and values into the cache, in place.

        Args:
            key: ``[T, KN, D]`` with T at least ``num_token_rows``; further rows are not written.
            value: ``[T, KN, D]``.
            key_cache: ``[num_blocks, KN, block_size, D]`` view, any strides.
            value_cache: As ``key_cache``.
            slot_mapping: ``[num_token_rows]`` int64; tokens with a negative slot are skipped.

        Raises:
            InvalidFieldError: Fewer key rows than slots.
            ascend_attn_ops.OpArgumentError: Shapes or dtypes break the operator's contract.
        """
        rows = slot_mapping.shape[0]
        if key.shape[0] < rows:
            raise InvalidFieldError("key", f"{key.shape[0]} rows", f"at least {rows}, one per slot")
        if rows == 0:
            return
        caches = self._writing.views(key_cache, value_cache)
        tensors = {
            "key": (key if key.shape[0] == rows else key[:rows]).contiguous(),
            "value": (value if value.shape[0] == rows else value[:rows]).contiguous(),
            "key_cache": caches[0],
            "value_cache": caches[1],
            "slot_mapping": slot_mapping,
        }
        self._writing.calls(scatter_pa_kv_cache, tensors, None, norm_mode)

    def _check(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        metadata: StepCounts,
        output: torch.Tensor,
    ) -> None:
        heads = (self.num_heads, self.head_size)
        if query.shape[1:] != heads or query.shape[0] < metadata.num_tokens:
            allowed = f"[at least {metadata.num_tokens}, {self.num_heads}, {self.head_size}]"
            raise InvalidFieldError("query", list(query.shape), allowed)
        if output.shape != query.shape:
            raise InvalidFieldError("output", list(output.shape), f"{list(query.shape)}, as query")
        cache = (self.num_kv_heads, metadata.block_size, self.head_size)
        if key_cache.shape[1:] != cache:
            raise InvalidFieldError(
                "key_cache", list(key_cache.shape), f"[num_blocks, {', '.join(map(str, cache))}]"
            )


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise InvalidFieldError(name, value, "at least 1")
    return value
