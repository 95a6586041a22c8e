"""The draft backend's identity: its parts, its cache, and what it refuses."""

from __future__ import annotations

from typing import Any, ClassVar

import ascend_attn_ops
from ascend_attn_ops import Refusal
from ascend_hwprofile import HardwareProfile

from ..draft_gate import judge_draft_gate
from ..kv_layout import PagedCacheShape
from ..masks import BAND, TEMPLATE_SIZE, MaskMode
from ..request import BackendRequest
from .builder import AscendFlashAttentionMetadataBuilder
from .impl import AscendFlashAttentionImpl
from .metadata import AscendFlashAttentionMetadata


class AscendFlashAttentionBackend:
    """Attention of draft layers with lengths that never leave the device (A5).

    It stands before the table: a layer that passes the gate (:func:`judge_draft_gate`) and the
    operator's contract goes here, every other one to the backend that it had anyway.
    """

    name: ClassVar[str] = "draft_flash"
    metadata_class: ClassVar[type[AscendFlashAttentionMetadata]] = AscendFlashAttentionMetadata
    builder_class: ClassVar[type[AscendFlashAttentionMetadataBuilder]] = (
        AscendFlashAttentionMetadataBuilder
    )
    impl_class: ClassVar[type[AscendFlashAttentionImpl]] = AscendFlashAttentionImpl

    @staticmethod
    def cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> PagedCacheShape:
        """Geometry of a layer's key cache, and of its value cache."""
        return PagedCacheShape(num_blocks, num_kv_heads, block_size, head_size)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why this backend does not take the request; empty when it does.

        First the terms of the gate; when all hold, the contract of the operator for the smallest
        step of such a layer.
        """
        refusals = [term.refusal() for term in judge_draft_gate(request, profile) if term.broken]
        if refusals:
            return refusals
        return ascend_attn_ops.check(
            "flash_attn", _smallest_step(request), profile, provider=request.provider
        )


def _smallest_step(request: BackendRequest) -> dict[str, Any]:
    """Arguments of flash_attn for one request with one token, as data."""
    mode = MaskMode.for_window(request.sliding_window, causal=request.causal)
    windowed = mode.sparse_mode == BAND
    pages = _tensor(request, 1, request.block_size, request.num_kv_heads, request.head_size)
    template = {"shape": [TEMPLATE_SIZE, TEMPLATE_SIZE], "dtype": "int8"}
    return {
        "q": _tensor(request, 1, request.num_heads, request.head_size),
        "k": pages,
        "v": pages,
        "block_table": _int32(1, 1),
        "cu_seqlens_q": _int32(2),
        "seqused_kv": _int32(1),
        "attn_mask": template if mode.needs_template else None,
        "metadata": _int32(1),
        "softmax_scale": request.head_size**-0.5,
        "mask_mode": mode.sparse_mode,
        "win_left": mode.pre_tokens if windowed else -1,
        "win_right": mode.next_tokens if windowed else -1,
        "max_seqlen_q": 1,
        "max_seqlen_kv": 1,
        "layout_q": "TND",
        "layout_kv": "PA_BBND",
        "layout_out": "TND",
    }


def _tensor(request: BackendRequest, *shape: int) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": request.dtype_name}


def _int32(*shape: int) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": "int32"}
