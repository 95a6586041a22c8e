"""Per-layer work of the draft backend: plan, call the operator, copy into the caller's output."""

from __future__ import annotations

from typing import Any

import torch

from ascend_attn_ops import FlashAttnArguments

from ..kv_layout import blocks_are_dense
from ..masks import BAND, MaskMode
from ..paged_layer import PagedAttentionLayer
from ..plan_cache import PlanGeometry, require_fitting_plan
from ..transfer_window import attention_transfer_window
from .metadata import AscendFlashAttentionMetadata

_UNLIMITED = -1  # a window side of flash_attn in the modes that have no window


class AscendFlashAttentionImpl(PagedAttentionLayer):
    """Attention of one draft layer; see :class:`PagedAttentionLayer` for its arguments.

    Mask mode 4 with a sliding window, 3 for causal layers, 0 otherwise. The lengths never leave the
    device: operator and plan take them as tensors.
    """

    def forward(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AscendFlashAttentionMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of this step's tokens over the cache, their own keys included.

        The operator runs inside :func:`attention_transfer_window`.

        Args:
            query: ``[num_token_rows, N, D]``, any strides.
            key_cache: ``[num_blocks, KN, block_size, D]`` view; token-major memory, or contiguous
                within each head.
            value_cache: As ``key_cache``.
            metadata: Of this step.
            output: ``[num_token_rows, N, D]``, written in place. Rows after ``metadata.num_tokens``
                (padding) become 0.

        Returns:
            ``output`` itself.

        Raises:
            InvalidFieldError: A shape does not fit the layer or the metadata.
            PlanMismatchError: The cached plan was made for another call.
            TransferWindowError: A transfer window is already open.
            ascend_attn_ops.OpArgumentError: The arguments break the operator's contract.
        """
        self._check(query, key_cache, metadata, output)
        tokens = metadata.num_tokens
        if tokens:
            call = self._call(query[:tokens].contiguous(), key_cache, value_cache, metadata)
            with attention_transfer_window():
                result = torch.ops.ascend_attn.flash_attn(**call)[0]
                output[:tokens].copy_(result)
        if output.shape[0] > tokens:
            output[tokens:].zero_()
        return output

    def geometry(
        self, metadata: AscendFlashAttentionMetadata, layout_kv: str = "PA_BBND"
    ) -> PlanGeometry:
        """What of this layer and step a plan depends on.

        Args:
            metadata: Of the step.
            layout_kv: Layout in which the operator reads the layer's cache.
        """
        mode = self._modes[metadata.causal]
        left, right = _window(mode)
        return PlanGeometry(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            mask_mode=mode.sparse_mode,
            win_left=left,
            win_right=right,
            layout_kv=layout_kv,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
        )

    def _call(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AscendFlashAttentionMetadata,
    ) -> dict[str, Any]:
        """Arguments of the operator call by name, its plan included and checked."""
        key, value, layout = _cache_views(key_cache, value_cache)
        geometry, lengths = self.geometry(metadata, layout), metadata.lengths
        plan = metadata.plans.plan(lengths, geometry)
        call: dict[str, Any] = {
            "q": query,
            "k": key,
            "v": value,
            "block_table": metadata.block_table,
            "cu_seqlens_q": lengths.query_starts,
            "seqused_q": lengths.used_query_lens,
            "seqused_kv": lengths.seq_lens,
            "attn_mask": metadata.causal_template if geometry.mask_mode else None,
            "metadata": plan.metadata,
            "softmax_scale": self.scale,
            "mask_mode": geometry.mask_mode,
            "win_left": geometry.win_left,
            "win_right": geometry.win_right,
            "max_seqlen_q": geometry.max_query_len,
            "max_seqlen_kv": geometry.max_seq_len,
            "layout_q": "TND",
            "layout_kv": layout,
            "layout_out": "TND",
        }
        require_fitting_plan(plan, FlashAttnArguments(**call))
        return call


def _window(mode: MaskMode) -> tuple[int, int]:
    if mode.sparse_mode != BAND:
        return _UNLIMITED, _UNLIMITED
    return mode.pre_tokens, mode.next_tokens


def _cache_views(
    key_cache: torch.Tensor, value_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Both caches as the operator reads them without a copy, and the name of that layout."""
    key, value = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    if blocks_are_dense(key) and blocks_are_dense(value):
        return key, value, "PA_BBND"
    return key_cache, value_cache, "PA_BNBD"
