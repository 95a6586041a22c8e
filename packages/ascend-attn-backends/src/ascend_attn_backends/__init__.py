"""Attention backends for Ascend NPUs with a selection that explains itself.

A step is described once (:class:`AttentionBatch`), its metadata is built once
(``...MetadataBuilder.build``), and every layer runs on it (``...Impl.forward``).
"""

from .batch import AttentionBatch
from .errors import AttentionBackendError, AttentionBatchError, InvalidFieldError, NoBackendError
from .kv_layout import (
    PAD_SLOT,
    PagedCacheShape,
    attention_view,
    element_offsets,
    num_blocks_for,
    scatter_view,
    slots_for_positions,
)
from .masks import AttentionMaskBuilder, MaskMode
from .request import BackendRequest
from .selection import (
    AttentionBackend,
    Selection,
    Verdict,
    get_attn_backend_cls,
    select_backend,
)
from .split import BatchSplit, RequestGroup, prefill_flags
from .standard import (
    AscendAttentionBackend,
    AscendAttentionBackendImpl,
    AscendAttentionMetadataBuilder,
    AscendMetadata,
    AttentionLaunch,
)
from .starts import repair_starts
from .transfer import copy_to_device

__all__ = [
    "PAD_SLOT",
    "AscendAttentionBackend",
    "AscendAttentionBackendImpl",
    "AscendAttentionMetadataBuilder",
    "AscendMetadata",
    "AttentionBackend",
    "AttentionBackendError",
    "AttentionBatch",
    "AttentionBatchError",
    "AttentionLaunch",
    "AttentionMaskBuilder",
    "BackendRequest",
    "BatchSplit",
    "InvalidFieldError",
    "MaskMode",
    "NoBackendError",
    "PagedCacheShape",
    "RequestGroup",
    "Selection",
    "Verdict",
    "attention_view",
    "copy_to_device",
    "element_offsets",
    "get_attn_backend_cls",
    "num_blocks_for",
    "prefill_flags",
    "repair_starts",
    "scatter_view",
    "select_backend",
    "slots_for_positions",
]
