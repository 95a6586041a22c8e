"""Executable contracts, references and providers for CANN attention operators."""

from . import _torch_import as _torch_import  # first: everything below imports torch
from .arguments import from_data
from .context import current_profile, current_provider, sanitize, use_profile, use_provider
from .contract import Contract, Finding, Rule, RuleContext, Scope, Stage
from .operator import NpuCall, Operator, Provider, Sample, TensorMeta, Tolerance
from .operators._shared.compiled import compile_loops
from .operators.attention_update import attention_update
from .operators.attention_update.arguments import AttentionUpdateArguments
from .operators.compressor import compressor
from .operators.compressor.arguments import CompressorArguments
from .operators.flash_attn import flash_attn
from .operators.flash_attn.arguments import FlashAttnArguments
from .operators.flash_attn.plan import FlashAttnPlan
from .operators.flash_attn_metadata import flash_attn_metadata
from .operators.flash_attn_metadata.arguments import FlashAttnMetadataArguments
from .operators.fused_infer_attention_score import fused_infer_attention_score
from .operators.fused_infer_attention_score.arguments import FusedInferAttentionScoreArguments
from .operators.fused_infer_attention_score_v2 import fused_infer_attention_score_v2
from .operators.fused_infer_attention_score_v2.arguments import FusedInferAttentionScoreV2Arguments
from .operators.gather_pa_kv_cache import gather_pa_kv_cache
from .operators.gather_pa_kv_cache.arguments import GatherPaKvCacheArguments
from .operators.interleave_rope import interleave_rope
from .operators.interleave_rope.arguments import InterleaveRopeArguments
from .operators.kv_quant_sparse_flash_attention import kv_quant_sparse_flash_attention
from .operators.kv_quant_sparse_flash_attention.arguments import (
    KvQuantSparseFlashAttentionArguments,
)
from .operators.kv_rmsnorm_rope_cache import kv_rmsnorm_rope_cache
from .operators.kv_rmsnorm_rope_cache.arguments import KvRmsnormRopeCacheArguments
from .operators.kv_rmsnorm_rope_cache_v2 import kv_rmsnorm_rope_cache_v2
from .operators.kv_rmsnorm_rope_cache_v2.arguments import KvRmsnormRopeCacheV2Arguments
from .operators.lightning_indexer import lightning_indexer
from .operators.lightning_indexer.arguments import LightningIndexerArguments
from .operators.mla_prolog_v2 import mla_prolog_v2
from .operators.mla_prolog_v2.arguments import MlaPrologV2Arguments
from .operators.mla_prolog_v3 import mla_prolog_v3
from .operators.mla_prolog_v3.arguments import MlaPrologV3Arguments
from .operators.paged_attention import paged_attention
from .operators.paged_attention.arguments import PagedAttentionArguments
from .operators.quant_lightning_indexer import quant_lightning_indexer
from .operators.quant_lightning_indexer.arguments import QuantLightningIndexerArguments
from .operators.quant_lightning_indexer_v2 import quant_lightning_indexer_v2
from .operators.quant_lightning_indexer_v2.arguments import QuantLightningIndexerV2Arguments
from .operators.reshape_and_cache import reshape_and_cache
from .operators.reshape_and_cache.arguments import ReshapeAndCacheArguments
from .operators.ring_attention_update import ring_attention_update
from .operators.ring_attention_update.arguments import RingAttentionUpdateArguments
from .operators.rotary_position_embedding import rotary_position_embedding
from .operators.rotary_position_embedding.arguments import RotaryPositionEmbeddingArguments
from .operators.scatter_pa_kv_cache import scatter_pa_kv_cache
from .operators.scatter_pa_kv_cache.arguments import ScatterPaKvCacheArguments
from .operators.sparse_flash_attention import sparse_flash_attention
from .operators.sparse_flash_attention.arguments import SparseFlashAttentionArguments
from .operators.sparse_flash_mla import sparse_flash_mla
from .operators.sparse_flash_mla.arguments import SparseFlashMlaArguments
from .operators.sparse_flash_mla_metadata import sparse_flash_mla_metadata
from .operators.sparse_flash_mla_metadata.arguments import SparseFlashMlaMetadataArguments
from .partial import PartialAttention, merge_partials
from .refusals import (
    ArgumentFormatError,
    AttentionOperatorError,
    NoProviderError,
    OpArgumentError,
    ProviderUnavailableError,
    Refusal,
    SanitizerError,
    UnknownOperatorError,
)
from .registry import all_operators, operator_named
from .selection import Explanation, check, explain, select
from .step_calls import CallSeries, StepCalls, call

__all__ = [
    "ArgumentFormatError",
    "AttentionOperatorError",
    "AttentionUpdateArguments",
    "CallSeries",
    "CompressorArguments",
    "Contract",
    "Explanation",
    "Finding",
    "FlashAttnArguments",
    "FlashAttnMetadataArguments",
    "FlashAttnPlan",
    "FusedInferAttentionScoreArguments",
    "FusedInferAttentionScoreV2Arguments",
    "GatherPaKvCacheArguments",
    "InterleaveRopeArguments",
    "KvQuantSparseFlashAttentionArguments",
    "KvRmsnormRopeCacheArguments",
    "KvRmsnormRopeCacheV2Arguments",
    "LightningIndexerArguments",
    "MlaPrologV2Arguments",
    "MlaPrologV3Arguments",
    "NoProviderError",
    "NpuCall",
    "OpArgumentError",
    "Operator",
    "PagedAttentionArguments",
    "PartialAttention",
    "Provider",
    "ProviderUnavailableError",
    "QuantLightningIndexerArguments",
    "QuantLightningIndexerV2Arguments",
    "Refusal",
    "ReshapeAndCacheArguments",
    "RingAttentionUpdateArguments",
    "RotaryPositionEmbeddingArguments",
    "Rule",
    "RuleContext",
    "Sample",
    "SanitizerError",
    "ScatterPaKvCacheArguments",
    "Scope",
    "SparseFlashAttentionArguments",
    "SparseFlashMlaArguments",
    "SparseFlashMlaMetadataArguments",
    "Stage",
    "StepCalls",
    "TensorMeta",
    "Tolerance",
    "UnknownOperatorError",
    "all_operators",
    "attention_update",
    "call",
    "check",
    "compile_loops",
    "compressor",
    "current_profile",
    "current_provider",
    "explain",
    "flash_attn",
    "flash_attn_metadata",
    "from_data",
    "fused_infer_attention_score",
    "fused_infer_attention_score_v2",
    "gather_pa_kv_cache",
    "interleave_rope",
    "kv_quant_sparse_flash_attention",
    "kv_rmsnorm_rope_cache",
    "kv_rmsnorm_rope_cache_v2",
    "lightning_indexer",
    "merge_partials",
    "mla_prolog_v2",
    "mla_prolog_v3",
    "operator_named",
    "paged_attention",
    "quant_lightning_indexer",
    "quant_lightning_indexer_v2",
    "reshape_and_cache",
    "ring_attention_update",
    "rotary_position_embedding",
    "sanitize",
    "scatter_pa_kv_cache",
    "select",
    "sparse_flash_attention",
    "sparse_flash_mla",
    "sparse_flash_mla_metadata",
    "use_profile",
    "use_provider",
]
