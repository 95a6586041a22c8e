"""Executable contracts, references and providers for CANN attention operators."""

from .arguments import from_data
from .context import current_profile, current_provider, sanitize, use_profile, use_provider
from .contract import Contract, Finding, Rule, RuleContext, Scope, Stage
from .operator import NpuCall, Operator, Provider, Sample, TensorMeta, Tolerance
from .operators.flash_attn_metadata import flash_attn_metadata
from .operators.flash_attn_metadata.arguments import FlashAttnMetadataArguments
from .operators.fused_infer_attention_score import fused_infer_attention_score
from .operators.fused_infer_attention_score.arguments import FusedInferAttentionScoreArguments
from .operators.scatter_pa_kv_cache import scatter_pa_kv_cache
from .operators.scatter_pa_kv_cache.arguments import ScatterPaKvCacheArguments
from .operators.sparse_flash_attention import sparse_flash_attention
from .operators.sparse_flash_attention.arguments import SparseFlashAttentionArguments
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

__all__ = [
    "ArgumentFormatError",
    "AttentionOperatorError",
    "Contract",
    "Explanation",
    "Finding",
    "FlashAttnMetadataArguments",
    "FusedInferAttentionScoreArguments",
    "NoProviderError",
    "NpuCall",
    "OpArgumentError",
    "Operator",
    "PartialAttention",
    "Provider",
    "ProviderUnavailableError",
    "Refusal",
    "Rule",
    "RuleContext",
    "Sample",
    "SanitizerError",
    "ScatterPaKvCacheArguments",
    "Scope",
    "SparseFlashAttentionArguments",
    "Stage",
    "TensorMeta",
    "Tolerance",
    "UnknownOperatorError",
    "all_operators",
    "check",
    "current_profile",
    "current_provider",
    "explain",
    "flash_attn_metadata",
    "from_data",
    "fused_infer_attention_score",
    "merge_partials",
    "operator_named",
    "sanitize",
    "scatter_pa_kv_cache",
    "select",
    "sparse_flash_attention",
    "use_profile",
    "use_provider",
]
