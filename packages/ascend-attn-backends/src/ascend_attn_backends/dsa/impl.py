"""Per-layer work of the compressed backend: write the window's cache, call the operator."""

from __future__ import annotations

from typing import Any

import torch

from ascend_attn_ops import PartialAttention, merge_partials

from ..errors import InvalidFieldError
from ..kv_layout import scatter_view
from ..latent_layout import kernel_view
from ..paged_step import check_shape, write_rows
from .builder import length_arguments, mask_arguments
from .compression import KEY_SIZE, DsaCompression
from .compressor import compressed_side
from .metadata import AscendDSAMetadata

_NO_SINK = -1e30
"""A sink of weight 0. Finite, so that a row without keys stays 0 instead of 0 / 0; the operator
wants sinks on every product, and says only that its lse leaves them out."""


class AscendDSAImpl:
    """Attention of one layer over a sliding window and compressed keys, with one softmax.

    Keys are values too, and all query heads share them.

    Args:
        num_heads: Query heads N of the layer on this rank.
        scale: Factor on the scores, ``head_size ** -0.5`` in DeepSeek-V4.
        compression: Of the layer; None for the window alone.
        sinks: ``[N]`` float32 learnable sinks; None for none.
        head_size: Elements of a key D; products take 512.

    Raises:
        InvalidFieldError: A count is not positive, or the sinks have another form.
    """

    def __init__(
        self,
        num_heads: int,
        scale: float,
        compression: DsaCompression | None = None,
        sinks: torch.Tensor | None = None,
        head_size: int = KEY_SIZE,
    ) -> None:
        for name, value in {"num_heads": num_heads, "head_size": head_size}.items():
            if value < 1:
                raise InvalidFieldError(name, value, "at least 1")
        if sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype != torch.float32):
            found = f"{str(sinks.dtype).removeprefix('torch.')} {list(sinks.shape)}"
            raise InvalidFieldError("sinks", found, f"float32 [{num_heads}]")
        self.num_heads, self.scale, self.head_size = num_heads, float(scale), head_size
        self.compression, self.sinks = compression, sinks

    def write_kv(
        self, kv: torch.Tensor, window_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write this step's keys into the cache of the window, in place.

        Args:
            kv: ``[T, D]`` normalised and rotated keys, T at least ``num_token_rows``.
            window_cache: ``[num_blocks, 1, block_size, D]`` view; a product wants it contiguous.
            slot_mapping: ``[num_token_rows]`` int64; tokens with a negative slot are skipped.

        Raises:
            InvalidFieldError: Fewer rows than slots.
            ascend_attn_ops.OpArgumentError: Shapes or dtypes break the operator's contract.
        """
        rows = ("kv", kv, window_cache)
        write_rows(rows, rows, slot_mapping)

    def forward(
        self,
        query: torch.Tensor,
        window_cache: torch.Tensor,
        metadata: AscendDSAMetadata,
        output: torch.Tensor,
        compressed_cache: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of this step's tokens over the caches, their own rows included.

        Args:
            query: ``[T or more, N, D]`` rotated queries, any strides.
            window_cache: ``[num_blocks, 1, block_size, D]`` view.
            metadata: Of this step and this kind of layer.
            output: ``[num_token_rows, N, D]``, written in place; its last elements still carry the
                rotation of the keys. Rows after ``metadata.num_tokens`` (padding) become 0.
            compressed_cache: ``[num_blocks, 1, block_size, D]`` view, where the layer compresses.
            topk_indices: ``[T or more, 1, k]`` int32 numbers of compressed keys, -1 for none, where
                the layer has an indexer.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata, or a cache or choice
                is missing or superfluous.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        rows = metadata.num_tokens
        check_shape("output", output, rows, self.num_heads, self.head_size)
        sinks = self._no_sinks(query) if self.sinks is None else self.sinks
        keys = (window_cache, compressed_cache, topk_indices)
        output[:rows] = self._attend(query, *keys, metadata, sinks=sinks)[0]
        output[rows:].zero_()
        return output

    def forward_partial(
        self,
        query: torch.Tensor,
        window_cache: torch.Tensor,
        metadata: AscendDSAMetadata,
        compressed_cache: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
    ) -> PartialAttention:
        """As :meth:`forward` without the sinks, to be merged with other parts of the keys.

        :meth:`with_sinks` adds the sinks to the merged whole, once.

        Returns:
            out ``[T, N, D]`` and natural-log lse ``[T, N]`` float32 of the T real tokens; a token
            without any key has out 0 and lse -inf.

        Raises:
            InvalidFieldError: As :meth:`forward`.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        keys = (window_cache, compressed_cache, topk_indices)
        sinks = self._no_sinks(query)
        out, lse = self._attend(query, *keys, metadata, sinks=sinks, return_softmax_lse=True)
        lse = lse.reshape(out.shape[:2])
        return PartialAttention.from_infinite_lse(out, lse.masked_fill(lse <= _NO_SINK, -torch.inf))

    def with_sinks(self, whole: PartialAttention) -> torch.Tensor:
        """``[T, N, D]`` attention with the layer's sinks: one more part, whose value is 0."""
        if self.sinks is None:
            return whole.out
        sink = PartialAttention(torch.zeros_like(whole.out), self.sinks.expand_as(whole.lse))
        return merge_partials([whole, sink]).out

    def _no_sinks(self, query: torch.Tensor) -> torch.Tensor:
        return query.new_full((self.num_heads,), _NO_SINK, dtype=torch.float32)

    def _attend(
        self,
        query: torch.Tensor,
        window_cache: torch.Tensor,
        compressed_cache: torch.Tensor | None,
        topk_indices: torch.Tensor | None,
        metadata: AscendDSAMetadata,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = metadata.num_tokens
        check_shape("query", query, rows, self.num_heads, self.head_size)
        if metadata.is_empty:
            out = query.new_zeros(rows, self.num_heads, self.head_size)
            return out, out.new_zeros(1, rows, self.num_heads, dtype=torch.float32)
        check_shape("window_cache", window_cache, 1, 1, metadata.block_size, self.head_size)
        result: tuple[torch.Tensor, torch.Tensor]
        result = torch.ops.ascend_attn.sparse_flash_mla(
            query[:rows].contiguous(),
            ori_kv=kernel_view("window_cache", window_cache, metadata.kernel_block_size),
            ori_block_table=metadata.block_table,
            cu_seqlens_q=metadata.query_starts,
            seqused_ori_kv=metadata.seq_lens,
            metadata=metadata.plan,
            softmax_scale=self.scale,
            layout_q="TND",
            layout_kv="PA_BBND",
            **mask_arguments(metadata.window, metadata.compressed),
            **length_arguments(metadata.compressed),
            **self._compressed_keys(compressed_cache, topk_indices, metadata),
            **options,
        )
        return result

    def _compressed_keys(
        self,
        cache: torch.Tensor | None,
        topk_indices: torch.Tensor | None,
        metadata: AscendDSAMetadata,
    ) -> dict[str, Any]:
        """Arguments of the compressed keys; refuses what does not belong to this kind of layer."""
        given = {"compressed_cache": cache, "topk_indices": topk_indices}
        wanted = {
            "compressed_cache": self.compression is not None,
            "topk_indices": self.compression is not None and self.compression.overlap,
        }
        for name, tensor in given.items():
            if (tensor is not None) != wanted[name]:
                found, allowed = ("None", "a tensor") if wanted[name] else ("a tensor", "None")
                raise InvalidFieldError(name, found, f"{allowed}, for {self.compression}")
        if self.compression is None:
            if metadata.compressed is not None:
                raise InvalidFieldError("metadata", "of compressing layers", "of the window alone")
            return {}
        compressed = compressed_side(metadata, self.compression)
        assert cache is not None  # noqa: S101 - refused above
        check_shape("compressed_cache", cache, 1, 1, compressed.block_size, self.head_size)
        arguments = {"cmp_kv": scatter_view(cache), "cmp_block_table": compressed.block_table}
        if topk_indices is not None:
            check_shape(
                "topk_indices", topk_indices, metadata.num_tokens, 1, self.compression.top_k
            )
            arguments["cmp_sparse_indices"] = topk_indices[: metadata.num_tokens].contiguous()
        return arguments
