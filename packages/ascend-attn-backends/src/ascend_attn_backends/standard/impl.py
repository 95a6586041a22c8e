"""Per-layer work of the standard backend: write the cache, call the operator."""

from __future__ import annotations

import torch

import ascend_attn_ops  # noqa: F401  registers torch.ops.ascend_attn

from ..errors import InvalidFieldError
from ..kv_layout import attention_view, scatter_view
from ..masks import MaskMode
from .metadata import AscendMetadata, AttentionLaunch


class AscendAttentionBackendImpl:
    """Attention of one layer.

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
        torch.ops.ascend_attn.scatter_pa_kv_cache(
            key[:rows].contiguous(),
            value[:rows].contiguous(),
            scatter_view(key_cache),
            scatter_view(value_cache),
            slot_mapping,
            cache_mode="Norm",
        )

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AscendMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of this step's tokens over the cache, their own keys included.

        Args:
            query: ``[num_token_rows, N, D]``, any strides.
            key_cache: ``[num_blocks, KN, block_size, D]`` view, any strides.
            value_cache: As ``key_cache``.
            metadata: Of this step.
            output: ``[num_token_rows, N, D]``, written in place. Rows after ``metadata.num_tokens``
                (padding) become 0.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        self._check(query, key_cache, metadata, output)
        key, value = attention_view(key_cache), attention_view(value_cache)
        for launch in metadata.launches:
            result = self._attend(launch.gather(query), key, value, metadata, launch)
            launch.scatter(result, output)
        if output.shape[0] > metadata.num_tokens:
            output[metadata.num_tokens :].zero_()
        return output

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AscendMetadata,
        launch: AttentionLaunch,
    ) -> torch.Tensor:
        mode = self._modes[launch.causal]
        result: torch.Tensor = torch.ops.ascend_attn.fused_infer_attention_score(
            query,
            key,
            value,
            atten_mask=metadata.causal_template if mode.needs_template else None,
            actual_seq_lengths=launch.query_lens_cumulative,
            actual_seq_lengths_kv=launch.seq_lens,
            block_table=launch.block_table,
            num_heads=self.num_heads,
            scale=self.scale,
            pre_tokens=mode.pre_tokens,
            next_tokens=mode.next_tokens,
            input_layout="TND",
            num_key_value_heads=self.num_kv_heads,
            sparse_mode=mode.sparse_mode,
            block_size=metadata.block_size,
        )[0]
        return result

    def _check(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        metadata: AscendMetadata,
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
