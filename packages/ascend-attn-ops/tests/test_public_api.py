from __future__ import annotations

import ascend_attn_ops

RECORDS_AND_FUNCTIONS = {
    "ArgumentFormatError", "AttentionOperatorError", "CallSeries", "Contract",
    "Explanation", "Finding", "FlashAttnPlan",
    "NoProviderError", "NpuCall", "OpArgumentError", "Operator", "PartialAttention", "Provider",
    "ProviderUnavailableError", "Refusal", "Rule", "RuleContext", "Sample", "SanitizerError",
    "Scope", "Stage", "StepCalls", "TensorMeta", "Tolerance", "UnknownOperatorError",
    "all_operators", "call", "check", "compile_loops", "current_profile", "current_provider",
    "explain", "from_data", "merge_partials", "operator_named", "sanitize", "select",
    "use_profile", "use_provider",
}  # fmt: skip
OPERATORS = {
    "attention_update": "AttentionUpdateArguments",
    "compressor": "CompressorArguments",
    "flash_attn": "FlashAttnArguments",
    "flash_attn_metadata": "FlashAttnMetadataArguments",
    "fused_infer_attention_score": "FusedInferAttentionScoreArguments",
    "fused_infer_attention_score_v2": "FusedInferAttentionScoreV2Arguments",
    "gather_pa_kv_cache": "GatherPaKvCacheArguments",
    "interleave_rope": "InterleaveRopeArguments",
    "kv_quant_sparse_flash_attention": "KvQuantSparseFlashAttentionArguments",
    "kv_rmsnorm_rope_cache": "KvRmsnormRopeCacheArguments",
    "kv_rmsnorm_rope_cache_v2": "KvRmsnormRopeCacheV2Arguments",
    "lightning_indexer": "LightningIndexerArguments",
    "mla_prolog_v2": "MlaPrologV2Arguments",
    "mla_prolog_v3": "MlaPrologV3Arguments",
    "paged_attention": "PagedAttentionArguments",
    "quant_lightning_indexer": "QuantLightningIndexerArguments",
    "quant_lightning_indexer_v2": "QuantLightningIndexerV2Arguments",
    "reshape_and_cache": "ReshapeAndCacheArguments",
    "ring_attention_update": "RingAttentionUpdateArguments",
    "rotary_position_embedding": "RotaryPositionEmbeddingArguments",
    "scatter_pa_kv_cache": "ScatterPaKvCacheArguments",
    "sparse_flash_attention": "SparseFlashAttentionArguments",
    "sparse_flash_mla": "SparseFlashMlaArguments",
    "sparse_flash_mla_metadata": "SparseFlashMlaMetadataArguments",
}


def test_exported_names_are_pinned() -> None:
    assert set(ascend_attn_ops.__all__) == (
        RECORDS_AND_FUNCTIONS | set(OPERATORS) | set(OPERATORS.values())
    )
    for name in ascend_attn_ops.__all__:
        assert hasattr(ascend_attn_ops, name)


def test_every_registered_operator_is_exported_under_its_name() -> None:
    for op in ascend_attn_ops.all_operators():
        assert getattr(ascend_attn_ops, op.name) is op
        assert getattr(ascend_attn_ops, OPERATORS[op.name]) is op.record
