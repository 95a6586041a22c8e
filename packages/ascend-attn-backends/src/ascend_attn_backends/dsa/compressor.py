"""Per-layer work of the compressor: keys from hidden states, and the state between steps."""

from __future__ import annotations

import attrs
import torch

from ..errors import InvalidFieldError
from ..paged_step import check_shape, write_rows
from .compression import KEY_SIZE, ROPE_SIZE, DsaCompression
from .metadata import AscendDSAMetadata, CompressedStep

_INTERLEAVED = 2
"""``rotary_mode`` of elements 2i and 2i + 1 as a pair; the signature's default 1 is not built."""


@attrs.frozen(eq=False)
class CompressorWeights:
    """Weights of one compressor, H hidden and W = coff * D channels.

    Attributes:
        kv: ``[W, H]`` values of a token (``kv_proj``); dtype of the hidden states.
        gate: ``[W, H]`` scores of a token (``gate_proj``); dtype of the hidden states.
        position_bias: ``[ratio, W]`` float32, added to the scores by place in the group.
        norm: ``[D]`` weight of the key's norm; products want the dtype of the hidden states.
    """

    kv: torch.Tensor
    gate: torch.Tensor
    position_bias: torch.Tensor
    norm: torch.Tensor


class AscendDSACompressor:
    """Compressed keys of one layer, or index keys of its indexer.

    Args:
        compression: Of the layer.
        weights: Of this compressor.
        key_size: Elements of a key D: products take 512, and 128 for index keys.
        rope_size: Rotated elements at the end of a key; products take 64.
        norm_eps: Epsilon of the norm.

    Raises:
        InvalidFieldError: A weight has another shape.
    """

    def __init__(
        self,
        compression: DsaCompression,
        weights: CompressorWeights,
        key_size: int = KEY_SIZE,
        rope_size: int = ROPE_SIZE,
        norm_eps: float = 1e-6,
    ) -> None:
        width = compression.coff * key_size
        check_shape("kv", weights.kv, width, None)
        check_shape("gate", weights.gate, width, weights.kv.shape[1])
        check_shape("position_bias", weights.position_bias, compression.ratio, width)
        check_shape("norm", weights.norm, key_size)
        self.compression, self.weights = compression, weights
        self.key_size, self.rope_size, self.norm_eps = key_size, rope_size, norm_eps

    def forward(
        self,
        hidden: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
        metadata: AscendDSAMetadata,
    ) -> torch.Tensor:
        """Keys of the groups that end in this step; updates the state in place.

        Args:
            hidden: ``[T or more, H]`` input of the attention layer.
            state: (kv_state, score_state), each ``[num_blocks, block_size, W]`` float32.
            rotary: (cos, sin), each ``[num_keys, rope_size]``: the rows of the rotary table at
                ``metadata.compressed.compressor.key_positions``, each angle twice in a row.
            metadata: Of this step.

        Returns:
            ``[num_keys, D]`` normalised and rotated keys, in the order of their ``key_slots``; rows
            without a slot hold anything.

        Raises:
            InvalidFieldError: A shape does not fit, or the metadata is that of other layers.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        if metadata.is_empty:
            return hidden.new_zeros(0, self.key_size)
        rows = compressed_side(metadata, self.compression).compressor
        cos, sin = rotary
        count = len(rows.key_slots)
        check_shape("hidden", hidden, metadata.num_tokens, self.weights.kv.shape[1])
        check_shape("cos", cos, count, self.rope_size)
        check_shape("sin", sin, count, self.rope_size)
        keys: torch.Tensor = torch.ops.ascend_attn.compressor(
            rows.tokens(hidden, metadata.num_tokens),
            self.weights.kv,
            self.weights.gate,
            *state,
            self.weights.position_bias,
            self.weights.norm,
            sin[:count].contiguous(),
            cos[:count].contiguous(),
            kv_block_table=rows.state_table,
            score_block_table=rows.state_table,
            cu_seqlens=rows.starts,
            start_pos=rows.first_positions,
            rope_head_dim=self.rope_size,
            cmp_ratio=self.compression.ratio,
            coff=self.compression.coff,
            norm_eps=self.norm_eps,
            rotary_mode=_INTERLEAVED,
        )[0]
        return keys

    def write_kv(
        self, keys: torch.Tensor, cache: torch.Tensor, metadata: AscendDSAMetadata
    ) -> None:
        """Write the keys of :meth:`forward` into their cache, in place.

        Args:
            keys: ``[num_keys, D]``.
            cache: ``[num_blocks, 1, block_size, D]`` view; a product wants it contiguous.
            metadata: Of this step.

        Raises:
            InvalidFieldError: Fewer keys than slots, or the metadata is that of other layers.
            ascend_attn_ops.OpArgumentError: Shapes or dtypes break the operator's contract.
        """
        if metadata.is_empty:
            return
        compressed = compressed_side(metadata, self.compression)
        check_shape("cache", cache, 1, 1, compressed.block_size, self.key_size)
        rows = ("keys", keys, cache)
        write_rows(rows, rows, compressed.compressor.key_slots)


def compressed_side(metadata: AscendDSAMetadata, compression: DsaCompression) -> CompressedStep:
    """The compressed side of a step, for a layer with this compression.

    Raises:
        InvalidFieldError: The metadata is that of layers with another compression.
    """
    found = metadata.compressed
    if found is None or found.compression != compression:
        what = "the window alone" if found is None else found.compression
        raise InvalidFieldError(
            "metadata", f"of layers with {what}", f"of layers with {compression}"
        )
    return found
