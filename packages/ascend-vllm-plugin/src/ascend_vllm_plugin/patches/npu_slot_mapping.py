"""Cache slots of a step's tokens without Triton.

`BlockTable.compute_slot_mapping` launches a Triton kernel; on a CPU vLLM itself puts a C++ kernel
in its place, for an NPU it has none.
"""

from __future__ import annotations

import torch

from ascend_vllm_plugin.compat import SINCE_0_32, require_supported_vllm
from ascend_vllm_plugin.patches.kernel_dispatchers import LaunchableFunction, install_kernel


def slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    BLOCKS_PER_KV_BLOCK: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """Fill in where each token's keys and values go, in place; nothing is read by the host.

    Args:
        num_tokens: tokens of the step; what follows them in `slot_mapping` becomes `PAD_ID`.
        max_num_tokens: elements of `slot_mapping`.
        query_start_loc: [num_reqs + 1 or more] int32, first token of each request; rows after the
            last request repeat the number of tokens.
        positions: [num_tokens] int64, of each token in its request.
        block_table: [max_num_reqs, max_blocks] int32.
        block_table_stride: elements of a row; part of the table.
        block_size: tokens per block of the table.
        slot_mapping: [max_num_tokens] int64, written.
        KV_CACHE_BLOCK_SIZE: tokens per block of vLLM's manager; the table has split them.
        BLOCKS_PER_KV_BLOCK: the number of parts.
        TOTAL_CP_WORLD_SIZE: 1; the standalone base refuses context parallelism.
        TOTAL_CP_RANK: 0.
        CP_KV_CACHE_INTERLEAVE_SIZE: of no account without context parallelism.
        PAD_ID: slot of what is not stored.
        BLOCK_SIZE: width of the Triton kernel's tile; the dispatcher always passes it.
    """
    _write_slots(
        slot_mapping[:max_num_tokens],
        query_start_loc,
        positions[:num_tokens],
        block_table,
        block_size,
        PAD_ID,
    )


def slot_mapping_of_whole_blocks(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """The same as vLLM asks for it since 0.32, whose tables split no blocks.

    Args:
        num_tokens: as for `slot_mapping`, and so are the others.
        max_num_tokens: elements of `slot_mapping`.
        query_start_loc: [num_reqs + 1 or more] int32.
        positions: [num_tokens] int64.
        block_table: [max_num_reqs, max_blocks] int32.
        block_table_stride: elements of a row.
        slot_mapping: [max_num_tokens] int64, written.
        KV_CACHE_BLOCK_SIZE: tokens per block.
        TOTAL_CP_WORLD_SIZE: 1.
        TOTAL_CP_RANK: 0.
        CP_KV_CACHE_INTERLEAVE_SIZE: of no account.
        PAD_ID: slot of what is not stored.
        BLOCK_SIZE: of no account.
    """
    _write_slots(
        slot_mapping[:max_num_tokens],
        query_start_loc,
        positions[:num_tokens],
        block_table,
        KV_CACHE_BLOCK_SIZE,
        PAD_ID,
    )


def _write_slots(
    slots: torch.Tensor,
    starts: torch.Tensor,
    places: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    pad: int,
) -> None:
    count = places.shape[0]
    tokens = torch.arange(count, dtype=starts.dtype, device=starts.device)
    rows = torch.searchsorted(starts, tokens, right=True) - 1
    rows = rows.clamp(max=block_table.shape[0] - 1)
    blocks = block_table[rows, places // block_size].long()
    slots[:count] = blocks * block_size + places % block_size
    slots[count:].fill_(pad)


def apply() -> bool:
    """Put the function that this vLLM calls behind the dispatcher; always needed."""
    from vllm.v1.worker import block_table

    whole = require_supported_vllm() in SINCE_0_32
    kernel = slot_mapping_of_whole_blocks if whole else slot_mapping
    install_kernel(block_table._COMPUTE_SLOT_MAPPING_KERNEL, LaunchableFunction(kernel))
    return True
