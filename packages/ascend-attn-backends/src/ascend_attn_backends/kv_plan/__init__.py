"""Which layers of a DeepSeek-V4 model keep which caches, in which blocks, and their bytes."""

from .groups import DsaCacheGroup
from .make import DsaKvPlanError, get_dsa_attn_kv_plan
from .plan import DsaAttnKvPlan, DsaKvPlanOptions, DsaModelShape, RequestBytes

__all__ = [
    "DsaAttnKvPlan",
    "DsaCacheGroup",
    "DsaKvPlanError",
    "DsaKvPlanOptions",
    "DsaModelShape",
    "RequestBytes",
    "get_dsa_attn_kv_plan",
]
