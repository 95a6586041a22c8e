"""One recorded attention call per layer: what it passes, and how it is issued again."""

from __future__ import annotations

from typing import Any

import attrs
import torch

import ascend_attn_ops  # noqa: F401  registers torch.ops.ascend_attn

from ..errors import InvalidFieldError
from ..kv_layout import attention_view, scatter_view
from ..masks import NO_MASK, MaskMode
from ..standard import AscendAttentionBackendImpl
from .buffers import DecodeBuffers


@attrs.frozen(eq=False, kw_only=True)
class PagedAttentionGraphParam:
    """A layer's call of ``paged_attention`` in a captured decode step.

    The operator has no mask and one query row per request, so each token is a row of its own with
    the keys up to its position: drafts under verification never see later ones.

    Attributes:
        layer: Name of the layer; replays go by it, not by the order of calls.
        query: ``[T, N, D]``, at one address for all replays.
        key_cache: ``[num_blocks, block_size, KN, D]`` view of the layer's cache.
        value_cache: As ``key_cache``.
        num_kv_heads: KN.
        num_heads: N.
        scale_value: Factor on the scores.
        buffers: Where block table and lengths are read from.
        out: ``[T, N, D]``, written in place.
        workspace: uint8 scratch memory of ``_npu_paged_attention_get_workspace``; None on a host.
    """

    layer: str
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    num_kv_heads: int
    num_heads: int
    scale_value: float
    buffers: DecodeBuffers
    out: torch.Tensor
    workspace: torch.Tensor | None = None

    def __attrs_post_init__(self) -> None:
        _check_rows(self.buffers, query=self.query, out=self.out)

    @classmethod
    def of_layer(
        cls,
        layer: str,
        impl: AscendAttentionBackendImpl,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        buffers: DecodeBuffers,
        out: torch.Tensor,
        workspace: torch.Tensor | None = None,
    ) -> PagedAttentionGraphParam:
        """The call for a causal layer of the standard backend.

        Args:
            layer: Its name.
            impl: Its geometry.
            query: ``[T, N, D]``.
            caches: Key and value cache, ``[num_blocks, KN, block_size, D]`` views.
            buffers: Of the layer's group.
            out: ``[T, N, D]``.
            workspace: Scratch memory, see :meth:`CapturedStep.workspace`.

        Raises:
            InvalidFieldError: The layer has a sliding window, which the operator has not, or a
                tensor has another number of rows than the step.
        """
        if impl.sliding_window is not None:
            raise InvalidFieldError(
                "sliding_window",
                impl.sliding_window,
                "None; fused_infer_attention_score has windows",
            )
        key_cache, value_cache = (scatter_view(cache) for cache in caches)
        return cls(
            layer=layer,
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            num_kv_heads=impl.num_kv_heads,
            num_heads=impl.num_heads,
            scale_value=impl.scale,
            buffers=buffers,
            out=out,
            workspace=workspace,
        )

    def launch(self) -> None:
        """Issue the call with the values that the buffers have now."""
        torch.ops.ascend_attn.paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.num_kv_heads,
            self.num_heads,
            self.scale_value,
            self.buffers.token_block_table,
            self.buffers.token_context_lens,
            self.out,
            workspace=self.workspace,
        )


@attrs.frozen(eq=False, kw_only=True)
class FusedInferAttentionGraphParam:
    """A layer's call of ``fused_infer_attention_score`` (FIA) in a captured decode step.

    The operator takes lengths as host integers, which a graph keeps as they were at capture: the
    call must be issued again for each replay. Mask mode, window and template are part of this
    record, so a replay cannot use others than the capture did.

    Attributes:
        layer: Name of the layer; replays go by it, not by the order of calls.
        query: ``[T, N, D]``, at one address for all replays.
        key: ``BnBsH`` or ``BnNBsD`` view of the layer's cache.
        value: As ``key``.
        num_kv_heads: KN.
        num_heads: N.
        scale: Factor on the scores.
        mode: Mask arguments.
        atten_mask: ``[2048, 2048]`` int8 template, or None in mode 0.
        buffers: Where block table and lengths are read from.
        out: ``[T, N, D]``, written in place.
    """

    layer: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    num_kv_heads: int
    num_heads: int
    scale: float
    mode: MaskMode
    atten_mask: torch.Tensor | None
    buffers: DecodeBuffers
    out: torch.Tensor

    def __attrs_post_init__(self) -> None:
        _check_rows(self.buffers, query=self.query, out=self.out)
        if self.mode.sparse_mode == NO_MASK and self.buffers.query_len > 1:
            raise InvalidFieldError(
                "mode",
                f"no mask with {self.buffers.query_len} tokens per request",
                "a causal mode or a window: drafts under verification must not see later ones",
            )

    @classmethod
    def of_layer(
        cls,
        layer: str,
        impl: AscendAttentionBackendImpl,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        buffers: DecodeBuffers,
        out: torch.Tensor,
        template: torch.Tensor,
    ) -> FusedInferAttentionGraphParam:
        """The call for a causal layer of the standard backend, sliding windows included.

        Args:
            layer: Its name.
            impl: Its geometry.
            query: ``[T, N, D]``.
            caches: Key and value cache, ``[num_blocks, KN, block_size, D]`` views.
            buffers: Of the layer's group.
            out: ``[T, N, D]``.
            template: Of :class:`AttentionMaskBuilder`.

        Raises:
            InvalidFieldError: A tensor has another number of rows than the step.
        """
        key, value = (attention_view(cache) for cache in caches)
        return cls(
            layer=layer,
            query=query,
            key=key,
            value=value,
            num_kv_heads=impl.num_kv_heads,
            num_heads=impl.num_heads,
            scale=impl.scale,
            mode=MaskMode.for_window(impl.sliding_window, causal=True),
            atten_mask=template,
            buffers=buffers,
            out=out,
        )

    def launch(self) -> None:
        """Issue the call with the values that the buffers have now."""
        result: Any = torch.ops.ascend_attn.fused_infer_attention_score(
            self.query,
            self.key,
            self.value,
            atten_mask=self.atten_mask,
            actual_seq_lengths=self.buffers.host_query_ends(),
            actual_seq_lengths_kv=self.buffers.host_seq_lens(),
            block_table=self.buffers.block_table,
            num_heads=self.num_heads,
            scale=self.scale,
            pre_tokens=self.mode.pre_tokens,
            next_tokens=self.mode.next_tokens,
            input_layout="TND",
            num_key_value_heads=self.num_kv_heads,
            sparse_mode=self.mode.sparse_mode,
            block_size=self.buffers.group.block_size,
        )
        self.out.copy_(result[0])


def _check_rows(buffers: DecodeBuffers, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape[0] != buffers.num_tokens:
            raise InvalidFieldError(
                name, f"{tensor.shape[0]} rows", f"{buffers.num_tokens}, as the captured step"
            )
