"""CPU kernels behind the kernel dispatchers of speculative decoding.

Since 0.30 vLLM calls these kernels through dispatcher objects that hold a Triton kernel.
Without a Triton for CPUs `CPUModelRunner._postprocess_triton` of 0.30 is meant to put C++ kernels
in their place; for the six below it still assigns to module names that nobody calls any more, and
the first step that verifies a draft fails with "Cannot inspect kernel parameters". Since 0.31 the
CPU platform places them itself (`register_triton_kernel_overrides`), and one is left.

Two of the C++ kernels cannot be used as they are, and have a torch version here:

- `expand_kernel_impl` converts its output to int64 and so loses a float output (temperature,
  top-p), and an int32 one as well, in later versions too;
- `eagle_step_slot_mapping_metadata_kernel_impl` of 0.30 knows nothing of the padded rows of the
  slot mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

from ascend_vllm_plugin.compat import KERNEL_MODULES, SINCE_0_31, require_supported_vllm

DISPATCHERS: Mapping[tuple[str, str], str] = {
    ("rejection_sampler", "_rejection_greedy_sample"): "rejection_greedy_sample_kernel",
    ("rejection_sampler", "_rejection_random_sample"): "rejection_random_sample_kernel",
    ("rejection_sampler", "_sample_recovered_tokens"): "sample_recovered_tokens_kernel",
    ("rejection_sampler", "_expand"): "expand",
    ("spec_decode", "_eagle_step_slot_mapping_metadata"): "eagle_step",
    ("spec_decode", "_copy_and_expand_dflash_inputs"): "copy_and_expand_dflash_inputs_kernel",
}
"""(module, dispatcher) -> kernel of vLLM's CPU kernel module, or one of this module."""


class LaunchableFunction:
    """A function with the two things that a dispatcher wants of a Triton kernel.

    `kernel[grid](...)` calls it, and `func` tells the names of its parameters.
    """

    def __init__(self, func: Callable[..., None]) -> None:
        self.func = func

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.func


def expand(
    output: torch.Tensor,
    input: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int,
) -> None:
    """Repeat each request's value for each of its tokens, in place.

    Args:
        output: [num_tokens], any dtype.
        input: [batch_size], same dtype; `replace_from` in it becomes `replace_to`.
        cu_num_tokens: [batch_size], cumulative number of tokens.
        replace_from: value to be replaced.
        replace_to: what takes its place.
        MAX_NUM_TOKENS: width of the Triton kernel's tile; the dispatcher always passes it.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input == replace_from, torch.full_like(input, replace_to), input)
    expanded = torch.repeat_interleave(values, counts.long())
    output[: expanded.shape[0]] = expanded


def eagle_step(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out_clamped_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    block_size: int,
    max_model_len: int,
    n_blocks_per_req: int,
    PAD_ID: int,
) -> None:
    """Move every request one draft token on, in place.

    A request at the end of the model's length gets position 0, length 1 and no slot.

    Args:
        positions: [batch_size], where the last token is.
        block_table: [>= batch_size, n_blocks_per_req], blocks of each request.
        seq_lens: [>= batch_size], tokens of each request; one more afterwards.
        out_clamped_positions: [>= batch_size], positions of the new tokens.
        out_slot_mapping: [>= batch_size], their slots; `PAD_ID` in rows beyond the batch.
        block_size: tokens per block.
        max_model_len: longest sequence, in tokens.
        n_blocks_per_req: width of the block table.
        PAD_ID: slot of a token that is not to be stored.
    """
    num_reqs = positions.shape[0]
    beyond = positions + 1 >= max_model_len
    position = torch.where(beyond, 0, positions + 1)
    column = (position // block_size).clamp(max=n_blocks_per_req - 1)
    rows = torch.arange(num_reqs, device=positions.device)
    slot = block_table[rows, column.long()].long() * block_size + position % block_size
    out_clamped_positions[:num_reqs] = position
    out_slot_mapping[:num_reqs] = torch.where(beyond, PAD_ID, slot)
    out_slot_mapping[num_reqs:] = PAD_ID
    lengths = seq_lens[:num_reqs]
    seq_lens[:num_reqs] = torch.where(beyond, 1, lengths + 1).clamp(max=max_model_len)


TORCH_KERNELS: Mapping[str, LaunchableFunction] = {
    "expand": LaunchableFunction(expand),
    "eagle_step": LaunchableFunction(eagle_step),
}


def apply() -> bool:
    """Put the CPU kernels behind the dispatchers; False where Triton runs them itself."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return False
    cpu_kernels = import_module(KERNEL_MODULES["cpu_kernels"])
    for (module, name), kernel in dispatchers(require_supported_vllm()).items():
        dispatcher = getattr(import_module(KERNEL_MODULES[module]), name)
        install_kernel(dispatcher, TORCH_KERNELS.get(kernel) or getattr(cpu_kernels, kernel))
    return True


def dispatchers(version: str) -> Mapping[tuple[str, str], str]:
    """Those of `DISPATCHERS` that a version of vLLM does not serve right itself."""
    if version in SINCE_0_31:
        return {place: kernel for place, kernel in DISPATCHERS.items() if kernel == "expand"}
    return DISPATCHERS


def install_kernel(dispatcher: Any, kernel: object) -> None:
    """Give a dispatcher another kernel, and make it read that kernel's parameter names."""
    dispatcher.kernel = kernel
    vars(dispatcher).pop("_kernel_arg_names", None)
