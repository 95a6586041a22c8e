"""Cache slots of a step's tokens without Triton.

`BlockTable.compute_slot_mapping` launches a Triton kernel; on a CPU vLLM itself puts a C++ kernel
in its place, for an NPU it has none.
"""

from __future__ import annotations

import torch

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
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=query_start_loc.device)
    rows = torch.searchsorted(query_start_loc, tokens, right=True) - 1
    rows = rows.clamp(max=block_table.shape[0] - 1)
    places = positions[:num_tokens]
    blocks = block_table[rows, places // block_size].long()
    slot_mapping[:num_tokens] = blocks * block_size + places % block_size
    slot_mapping[num_tokens:max_num_tokens].fill_(PAD_ID)


def apply() -> bool:
    """Put the function above behind the dispatcher; always needed."""
    from vllm.v1.worker import block_table

    install_kernel(block_table._COMPUTE_SLOT_MAPPING_KERNEL, LaunchableFunction(slot_mapping))
    return True
