"""Attention backends for Ascend NPUs with a selection that explains itself.

A step is described once (:class:`AttentionBatch`), its metadata is built once
(``...MetadataBuilder.build``), and every layer runs on it (``...Impl.forward``).
"""

from .batch import AttentionBatch
from .context_parallel import (
    AscendDCPMetadata,
    AscendMlaDCPBackend,
    AscendMlaDCPImpl,
    AscendMlaDCPMetadata,
    AscendMlaDCPMetadataBuilder,
    ContextShard,
    DCPGroup,
    DCPImplMixin,
    DCPMetadataBuilderMixin,
    LatentRankStep,
    SingleRankGroup,
    TorchDCPGroup,
    forward_mqa_over_shards,
    merge_shards,
    per_token_batch,
    sharded_batch,
)
from .draft_flash import (
    AscendFlashAttentionBackend,
    AscendFlashAttentionImpl,
    AscendFlashAttentionMetadata,
    AscendFlashAttentionMetadataBuilder,
    DraftStep,
    draft_step,
    keep_accepted,
)
from .draft_gate import GateTerm, judge_draft_gate
from .errors import (
    AttentionBackendError,
    AttentionBatchError,
    InvalidFieldError,
    NoBackendError,
    PlanMismatchError,
    TransferWindowError,
)
from .indexer import (
    AscendSFAIndexerBackend,
    AscendSFAIndexerImpl,
    AscendSFAIndexerMetadata,
    AscendSFAIndexerMetadataBuilder,
    IndexGroup,
    IndexRope,
    StaleSelectionError,
    TopKBuffer,
    index_groups,
    rotate_index_rows,
)
from .kv_layout import (
    PAD_SLOT,
    PagedCacheShape,
    attention_view,
    element_offsets,
    num_blocks_for,
    scatter_view,
    slots_for_positions,
)
from .kv_offload import HostKvStore, OffloadCapacityError, OffloadCounters, SelectedKvOffload
from .latent_layout import (
    SparseCacheShape,
    kernel_block_size_for,
    kernel_block_table,
    kernel_view,
)
from .masks import AttentionMaskBuilder, MaskMode
from .mla import (
    AscendMLABackend,
    AscendMLAImpl,
    AscendMLAMetadata,
    AscendMLAMetadataBuilder,
    CacheBytesPerToken,
    cache_bytes_per_token,
)
from .paged_step import PagedStep, PagedStepBuilder
from .plan_cache import PlanCache, PlanGeometry, StepLengths, require_fitting_plan
from .request import BackendRequest
from .selection import (
    AttentionBackend,
    Selection,
    Verdict,
    get_attn_backend_cls,
    select_backend,
)
from .sfa import AscendSFABackend, AscendSFAImpl, AscendSFAMetadata, AscendSFAMetadataBuilder
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
from .transfer_window import TransferListener, attention_transfer_window, transfer_listener

__all__ = [
    "PAD_SLOT",
    "AscendAttentionBackend",
    "AscendAttentionBackendImpl",
    "AscendAttentionMetadataBuilder",
    "AscendDCPMetadata",
    "AscendFlashAttentionBackend",
    "AscendFlashAttentionImpl",
    "AscendFlashAttentionMetadata",
    "AscendFlashAttentionMetadataBuilder",
    "AscendMLABackend",
    "AscendMLAImpl",
    "AscendMLAMetadata",
    "AscendMLAMetadataBuilder",
    "AscendMetadata",
    "AscendMlaDCPBackend",
    "AscendMlaDCPImpl",
    "AscendMlaDCPMetadata",
    "AscendMlaDCPMetadataBuilder",
    "AscendSFABackend",
    "AscendSFAImpl",
    "AscendSFAIndexerBackend",
    "AscendSFAIndexerImpl",
    "AscendSFAIndexerMetadata",
    "AscendSFAIndexerMetadataBuilder",
    "AscendSFAMetadata",
    "AscendSFAMetadataBuilder",
    "AttentionBackend",
    "AttentionBackendError",
    "AttentionBatch",
    "AttentionBatchError",
    "AttentionLaunch",
    "AttentionMaskBuilder",
    "BackendRequest",
    "BatchSplit",
    "CacheBytesPerToken",
    "ContextShard",
    "DCPGroup",
    "DCPImplMixin",
    "DCPMetadataBuilderMixin",
    "DraftStep",
    "GateTerm",
    "HostKvStore",
    "IndexGroup",
    "IndexRope",
    "InvalidFieldError",
    "LatentRankStep",
    "MaskMode",
    "NoBackendError",
    "OffloadCapacityError",
    "OffloadCounters",
    "PagedCacheShape",
    "PagedStep",
    "PagedStepBuilder",
    "PlanCache",
    "PlanGeometry",
    "PlanMismatchError",
    "RequestGroup",
    "SelectedKvOffload",
    "Selection",
    "SingleRankGroup",
    "SparseCacheShape",
    "StaleSelectionError",
    "StepLengths",
    "TopKBuffer",
    "TorchDCPGroup",
    "TransferListener",
    "TransferWindowError",
    "Verdict",
    "attention_transfer_window",
    "attention_view",
    "cache_bytes_per_token",
    "copy_to_device",
    "draft_step",
    "element_offsets",
    "forward_mqa_over_shards",
    "get_attn_backend_cls",
    "index_groups",
    "judge_draft_gate",
    "keep_accepted",
    "kernel_block_size_for",
    "kernel_block_table",
    "kernel_view",
    "merge_shards",
    "num_blocks_for",
    "per_token_batch",
    "prefill_flags",
    "repair_starts",
    "require_fitting_plan",
    "rotate_index_rows",
    "scatter_view",
    "select_backend",
    "sharded_batch",
    "slots_for_positions",
    "transfer_listener",
]
