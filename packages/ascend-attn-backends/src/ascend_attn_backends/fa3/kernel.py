"""The call of flash-attn-npu: pages as its kernels address them, arguments by name."""

from __future__ import annotations

import torch

from ..errors import InvalidFieldError
from ..kv_layout import blocks_are_dense
from .metadata import AscendFAMetadata
from .package import flash_attn_with_kvcache

_NO_WINDOW = (-1, -1)


def packed_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AscendFAMetadata,
    scale: float,
) -> torch.Tensor:
    """Attention of a step by ``flash_attn_with_kvcache``.

    The new keys are in the cache already, so none are appended. Keys are never split between cores
    (``num_splits`` 1): how many parts there are would depend on the rest of the batch, and with it
    the order of the sums of a row.

    Args:
        query: ``[num_tokens, N, D]`` contiguous.
        key_cache: ``[num_blocks, block_size, KN, D]``.
        value_cache: As ``key_cache``.
        metadata: Of this step.
        scale: Factor on the scores.

    Returns:
        ``[num_tokens, N, D]``.

    Raises:
        InvalidFieldError: The memory of a cache is not what the kernels read.
        ascend_attn_ops.ProviderUnavailableError: flash-attn-npu cannot be used here.
    """
    function = flash_attn_with_kvcache()
    keys, step = dense_pages("key_cache", key_cache)
    values, value_step = dense_pages("value_cache", value_cache)
    if step != value_step:
        raise InvalidFieldError(
            "value_cache",
            f"blocks {value_step} pages apart",
            f"{step} pages, as the key cache: one page table serves both",
        )
    table = metadata.block_table if step == 1 else metadata.block_table * step
    return function(
        query,
        keys,
        values,
        cache_seqlens=metadata.seq_lens,
        page_table=table,
        cu_seqlens_q=metadata.query_starts,
        max_seqlen_q=metadata.max_query_len,
        softmax_scale=scale,
        causal=metadata.causal,
        window_size=_NO_WINDOW,
        num_splits=1,
    )


def dense_pages(name: str, cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A cache as the kernels address it, and the pages from one block to the next.

    The kernels take the block stride from the shape, not from the tensor. Where other memory lies
    between the blocks, such as the values of the same block, it becomes pages that no table names.

    Args:
        name: Name of the cache, for the error.
        cache: ``[num_blocks, block_size, KN, D]``.

    Raises:
        InvalidFieldError: A block is not one piece of memory, or the distance between blocks is not
            a multiple of a block.
    """
    blocks, page = cache.shape[0], cache[:1].numel()
    step, rest = (1, 0) if blocks == 1 else divmod(cache.stride(0), page)
    if not blocks_are_dense(cache) or rest or step < 1:
        raise InvalidFieldError(
            name,
            f"strides {tuple(cache.stride())} for shape {list(cache.shape)}",
            f"token-major blocks of one piece, a multiple of {page} elements apart",
        )
    if step == 1:
        return cache, 1
    tokens, heads, size = cache.shape[1:]
    shape = ((blocks - 1) * step + 1, tokens, heads, size)
    return cache.as_strided(shape, (page, heads * size, size, 1)), step
