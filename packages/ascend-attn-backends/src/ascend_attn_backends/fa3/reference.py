"""Attention of every token by itself: the same arithmetic whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

import ascend_attn_ops
from ascend_attn_ops import PagedAttentionArguments

from .metadata import AscendFAMetadata


@attrs.frozen
class _Token:
    number: int
    row: int
    num_keys: int


def tokenwise_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AscendFAMetadata,
    scale: float,
) -> torch.Tensor:
    """Attention of a step by the reference of ``paged_attention``, one token per call.

    A call sees one query row and as many keys as that token may see, in fresh memory. So a row is
    a function of its own query and keys alone: bit for bit the same in a prefill, a chunk, a decode
    or a verification, beside any other requests and in blocks of any size.

    The contract of ``paged_attention`` has no say here: FA3 is not a CANN operator, and its own
    limits are those of flash-attn-npu.

    Args:
        query: ``[num_tokens, N, D]``.
        key_cache: ``[num_blocks, block_size, KN, D]``, any strides.
        value_cache: As ``key_cache``.
        metadata: Of this step; its lengths are read.
        scale: Factor on the scores.

    Returns:
        ``[num_tokens, N, D]``; a token that sees no key gives 0.
    """
    reference = ascend_attn_ops.paged_attention.providers["reference"]
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    for token in _tokens(metadata):
        own = query[token.number][None].clone()
        result = torch.empty_like(own)
        reference.run(
            PagedAttentionArguments(
                query=own,
                key_cache=key_cache,
                value_cache=value_cache,
                num_kv_heads=key_cache.shape[2],
                num_heads=own.shape[1],
                scale_value=scale,
                block_table=metadata.block_table[token.row][None],
                context_lens=torch.tensor([token.num_keys], dtype=torch.int32),
                out=result,
            )
        )
        out[token.number] = result[0]
    return out


def _tokens(metadata: AscendFAMetadata) -> Iterator[_Token]:
    """Every token of the step with the number of keys that it sees."""
    starts, keys = metadata.query_starts.tolist(), metadata.seq_lens.tolist()
    for row, count in enumerate(keys):
        first, end = starts[row], starts[row + 1]
        for number in range(first, end):
            hidden = end - 1 - number if metadata.causal else 0
            yield _Token(number, row, max(count - hidden, 0))
