"""Argument record of sparse_flash_attention."""

from __future__ import annotations

import attrs
import torch

from ...arguments import arguments_record
from .._shared.sequences import Sequences

UNLIMITED = 2**63 - 1


@arguments_record
class SparseFlashAttentionArguments:
    """MLA attention (absorbed form) of each query row over the keys that its indices name.

    ``s_j = scale_value * (<query_i, key_j> + <query_rope_i, key_rope_j>)``,
    ``out_i = sum_j exp(s_j - m) value_j / l`` with ``m = max_j s_j``, ``l = sum_j exp(s_j - m)``;
    a sink of the head joins ``m`` and ``l`` as a score without a value.

    The keys of row i of Lq: ``limit = Lkv`` (sparse_mode 0) or ``Lkv - Lq + i + 1`` (3, causal
    aligned bottom right). Of its index row the first ``min(K, ceil(limit / block))`` entries are
    read, up to the first -1. Entry x adds the tokens ``[x * block, (x + 1) * block)`` below limit,
    positions in the request's own keys. Decisions where the documents are silent: reading stops at
    the first -1 (the pairwise scan of one kernel is not imitated), a repeated entry counts as
    often as it is listed, an entry out of range is skipped.

    Dimensions: N query heads, one key head, D = 512 latent and 64 rotary elements, K entries.

    Attributes:
        query: BSND (B, S1, N, 512) or TND (T1, N, 512); float16 or bfloat16 (float32 and float64
            on the host providers only).
        key: BSND (B, S2, 1, 512), TND (T2, 1, 512) or PA_BSND (num_blocks, block_size, 1, 512).
        value: The tensor of key: the latent is both. What CANN reads when it is another one is
            (unverified); the host providers then follow the formula. None: the latent of key.
        sparse_indices: int32 (B, S1, 1, K) or (T1, 1, K), block indices packed to the front, -1
            fills the rest.
        scale_value: Multiplies the scores as it is.
        block_table: int32 (B, M) block ids for PA_BSND, else None.
        actual_seq_lengths_query: int32 (B,); TND: cumulative without a leading 0; BSND: lengths.
        actual_seq_lengths_kv: int32 (B,); TND: cumulative; BSND and PA_BSND: lengths.
        query_rope: Like query with 64 in place of 512.
        key_rope: Like key with 64 in place of 512.
        sparse_block_size: Tokens per index.
        layout_query: BSND or TND.
        layout_kv: BSND, TND or PA_BSND; equal to layout_query unless PA_BSND.
        sparse_mode: 0 all keys, 3 causal.
        pre_tokens: Only 2**63 - 1.
        next_tokens: Only 2**63 - 1.
        attention_mode: Must be passed as 2 (MLA absorbed); the schema's default 0 is refused.
        return_softmax_lse: Whether maximum and sum are returned.
        sinks: float32 (N,), Ascend950 only.

    Returns (attention_out, softmax_max, softmax_sum): attention_out like query; the other two
    float32 (B, 1, S1, N) or (1, T1, N), or (0,) when not asked for. Rows that may see no key and
    padding rows: out 0, max 0, sum 0; rows that may see keys and select none: out 0, max 0, sum 0,
    with sinks max = sink, sum = 1. Nobody may rely on max where sum is 0. The host providers do not
    round the weights to the input dtype before the second product, which the kernels do.

    Raises OpArgumentError with every broken rule.

    Source: op-plugin document npu_sparse_flash_attention; vllm-ascend
    csrc/attention/sparse_flash_attention; torch_npu 2.13 schema.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor | None
    sparse_indices: torch.Tensor
    scale_value: float
    block_table: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    actual_seq_lengths_query: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    actual_seq_lengths_kv: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    query_rope: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    key_rope: torch.Tensor | None = attrs.field(default=None, kw_only=True)
    sparse_block_size: int = attrs.field(default=1, kw_only=True)
    layout_query: str = attrs.field(default="BSND", kw_only=True)
    layout_kv: str = attrs.field(default="BSND", kw_only=True)
    sparse_mode: int = attrs.field(default=3, kw_only=True)
    pre_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    next_tokens: int = attrs.field(default=UNLIMITED, kw_only=True)
    attention_mode: int = attrs.field(default=0, kw_only=True)
    return_softmax_lse: bool = attrs.field(default=False, kw_only=True)
    sinks: torch.Tensor | None = attrs.field(default=None, kw_only=True)

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
