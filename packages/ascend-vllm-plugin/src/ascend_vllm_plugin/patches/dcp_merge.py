"""Merging the partial attention of ranks that share keys, in PyTorch.

vLLM's two functions that gather lse and outputs (`ag_rs`) merge with a Triton kernel whose launcher
asks a compiled kernel for its constants; kernels of Triton's interpreter (see `triton_interpreter`)
have none, and the first step stops. The third one (`a2a`, what vLLM takes for sparse models) has
kernels with one program per token and head: right, but interpreted they make a prompt of 200 tokens
wait for half a minute. The functions here have vLLM's signatures and merge with
ascend-attn-backends.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.ops import dcp

from ascend_attn_backends import DCPImplMixin, TorchDCPGroup
from ascend_attn_ops import PartialAttention, merge_partials
from ascend_vllm_plugin.patches.replacement import replace_name

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

Merged = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class _Ranks(DCPImplMixin):
    """The ranks of a group of vLLM."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.dcp_group = TorchDCPGroup(group.device_group)

    def own_heads(self, part: PartialAttention) -> PartialAttention:
        """This rank's heads, merged over the parts of all ranks."""
        return merge_partials(self._exchange_heads(part))

    def all_heads(self, part: PartialAttention) -> PartialAttention:
        """All heads, merged over the parts of all ranks."""
        gathered = (self.dcp_group.all_gather(tensor) for tensor in (part.out, part.lse))
        return merge_partials([PartialAttention(*one) for one in zip(*gathered, strict=True)])


def merge_to_own_heads(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: GroupCoordinator,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> Merged:
    """Merge over the ranks and keep the heads of this one.

    Args:
        cp_attn_out: [T, N, D], all heads over this rank's keys.
        cp_attn_lse: [T, N], -inf where this rank has no keys.
        cp_group: the ranks.
        ctx: cache of compiled kernels; not used.
        return_lse: whether the merged lse is wanted, too.
        is_lse_base_on_e: whether the lse is a natural logarithm or one to base 2.
        seq_lens: with `query_start_loc` the ranks without keys; the lse says so already.
        query_start_loc: see `seq_lens`.

    Returns:
        [T, N / ranks, D], and with `return_lse` the lse [T, N / ranks] to the same base.
    """
    part = PartialAttention(cp_attn_out, _natural(cp_attn_lse, is_lse_base_on_e))
    return _result(_Ranks(cp_group).own_heads(part), cp_attn_out, return_lse, is_lse_base_on_e)


def merge_to_all_heads(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: GroupCoordinator,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> Merged:
    """As `merge_to_own_heads`, but every rank gets all heads."""
    part = PartialAttention(cp_attn_out, _natural(cp_attn_lse, is_lse_base_on_e))
    return _result(_Ranks(cp_group).all_heads(part), cp_attn_out, return_lse, is_lse_base_on_e)


def _natural(lse: torch.Tensor, is_natural: bool) -> torch.Tensor:
    return lse.float() if is_natural else lse.float() * math.log(2)


def _result(
    merged: PartialAttention, out: torch.Tensor, with_lse: bool, is_natural: bool
) -> Merged:
    result = merged.out.to(out.dtype)
    if not with_lse:
        return result
    return result, merged.lse if is_natural else merged.lse / math.log(2)


REPLACEMENTS = {
    "cp_lse_ag_out_rs": merge_to_own_heads,
    "dcp_a2a_lse_reduce": merge_to_own_heads,
    "cp_lse_ag_out_ar": merge_to_all_heads,
}
"""Function of vLLM's module -> ours."""


def apply() -> bool:
    """Put the functions in the places of vLLM's."""
    for name, function in REPLACEMENTS.items():
        replace_name(dcp, function, name)
    return True
