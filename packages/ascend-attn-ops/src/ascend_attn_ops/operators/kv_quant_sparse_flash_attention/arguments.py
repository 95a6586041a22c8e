"""Argument record of kv_quant_sparse_flash_attention."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record
from .._shared.sequences import Sequences

UNLIMITED = 2**63 - 1


@arguments_record
class KvQuantSparseFlashAttentionArguments:
    """sparse_flash_attention over a packed cache of 8-bit latents, dequantised on the fly.

    A packed row has 656 bytes: 512 latent elements in four tiles of 128, 64 rotary elements in the
    dtype of query, and four float32 scales, one per tile. ``k_nope[d] = q8[d] * scale[d // 128]``,
    ``K = [k_nope, k_rope]``, ``V = k_nope``, ``Q = query`` = latent and rotary part side by side.
    Selection, masks, lengths and invalid rows are those of sparse_flash_attention. The dequantised
    latent is rounded to the dtype of query before the products (unverified).

    Attributes:
        query: BSND (B, S1, N, 576) or TND (T1, N, 576), float16 or bfloat16.
        key: int8 or float8_e4m3fn (Ascend950: also the bytes of hifloat8), BSND (B, S2, 1, 656),
            TND (T2, 1, 656) or PA_BSND (num_blocks, block_size, 1, 656).
        value: The tensor of key.
        sparse_indices: int32 (B, S1, 1, K) or (T1, 1, K), as in sparse_flash_attention.
        scale_value: Multiplies the scores as it is.
        key_quant_mode: Only 2 (per tile).
        value_quant_mode: Only 2 (per tile).
        key_dequant_scale: Must be None: the scales are in the rows.
        value_dequant_scale: Must be None.
        block_table: int32 (B, M) block ids for PA_BSND, else None.
        actual_seq_lengths_query: int32 (B,); TND: cumulative without a leading 0; BSND: lengths.
        actual_seq_lengths_kv: int32 (B,); TND: cumulative; BSND and PA_BSND: lengths.
        sparse_block_size: Tokens per index, at most 16; 1 on Ascend950.
        layout_query: BSND or TND.
        layout_kv: BSND, TND or PA_BSND; equal to layout_query unless PA_BSND.
        sparse_mode: 0 all keys, 3 causal.
        pre_tokens: Only 2**63 - 1.
        next_tokens: Only 2**63 - 1.
        attention_mode: Must be passed as 2; the schema's default 0 is refused.
        quant_scale_repo_mode: Only 1 (scales inside the rows).
        tile_size: Only 128.
        rope_head_dim: Only 64.
        key_dtype: torch_npu.hifloat8 where the bytes of key are hifloat8, else None.
        value_dtype: Like key_dtype.

    Returns attention_out, dtype of query, (B, S1, N, 512) or (T1, N, 512): the documents' "same
    shape as query" is wrong, the meta kernel takes the rotary part off.

    Raises OpArgumentError with every broken rule.

    Source: op-plugin document npu_kv_quant_sparse_flash_attention; vllm-ascend
    csrc/attention/kv_quant_sparse_flash_attention; torch_npu 2.13 schema (it has no sinks, which
    later documents list).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sparse_indices: torch.Tensor
    scale_value: float
    key_quant_mode: int
    value_quant_mode: int
    key_dequant_scale: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    value_dequant_scale: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    block_table: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    actual_seq_lengths_query: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    actual_seq_lengths_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    sparse_block_size: int = attrs.field(default=1, kw_only=True)
    layout_query: str = attrs.field(default="BSND", kw_only=True)
    layout_kv: str = attrs.field(default="BSND", kw_only=True)
    sparse_mode: int = attrs.field(default=3, kw_only=True)
    pre_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    next_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    attention_mode: int = attrs.field(default=0, kw_only=True)
    quant_scale_repo_mode: int = attrs.field(default=1, kw_only=True)
    tile_size: int = attrs.field(default=128, kw_only=True)
    rope_head_dim: int = attrs.field(default=64, kw_only=True)
    key_dtype: int | None = attrs.field(default=None, kw_only=True)
    value_dtype: int | None = attrs.field(default=None, kw_only=True)

    @property
    def sequences(self) -> Sequences:
        """Layouts and lengths of the call."""
        return Sequences(
            self.layout_query,
            self.layout_kv,
            self.query,
            self.key,
            self.actual_seq_lengths_query,
            self.actual_seq_lengths_kv,
            self.block_table,
        )
