from __future__ import annotations

import ascend_attn_backends

EXPORTS = [
    "HostKvStore",
    "OffloadCapacityError",
    "OffloadCounters",
    "SelectedKvOffload",
    "AscendFlashAttentionBackend",
    "AscendFlashAttentionImpl",
    "AscendFlashAttentionMetadata",
    "AscendFlashAttentionMetadataBuilder",
    "DraftStep",
    "draft_step",
    "keep_accepted",
    "GateTerm",
    "judge_draft_gate",
    "PlanMismatchError",
    "TransferWindowError",
    "PlanCache",
    "PlanGeometry",
    "StepLengths",
    "require_fitting_plan",
    "TransferListener",
    "attention_transfer_window",
    "transfer_listener",
    "AscendSFABackend",
    "AscendSFAImpl",
    "AscendSFAMetadata",
    "AscendSFAMetadataBuilder",
    "AscendSFAIndexerBackend",
    "AscendSFAIndexerImpl",
    "AscendSFAIndexerMetadata",
    "AscendSFAIndexerMetadataBuilder",
    "IndexGroup",
    "IndexRope",
    "StaleSelectionError",
    "TopKBuffer",
    "index_groups",
    "rotate_index_rows",
    "SparseCacheShape",
    "kernel_block_size_for",
    "kernel_block_table",
    "kernel_view",
    "PagedStep",
    "PagedStepBuilder",
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
    "PAD_SLOT",
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


def test_exports_are_pinned() -> None:
    assert sorted(ascend_attn_backends.__all__) == sorted(EXPORTS)
    for name in EXPORTS:
        assert hasattr(ascend_attn_backends, name)


def test_exports_are_documented() -> None:
    for name in EXPORTS:
        if name != "PAD_SLOT":
            assert getattr(ascend_attn_backends, name).__doc__
