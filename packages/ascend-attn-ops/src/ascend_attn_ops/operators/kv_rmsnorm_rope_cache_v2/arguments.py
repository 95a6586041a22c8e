"""Argument record of kv_rmsnorm_rope_cache_v2."""

from __future__ import annotations

import attrs

from ...arguments import arguments_record
from ..kv_rmsnorm_rope_cache.arguments import KvRmsnormRopeCacheArguments


@arguments_record
class KvRmsnormRopeCacheV2Arguments(KvRmsnormRopeCacheArguments):
    """Normalise and rotate the latent KV of MLA and write it into the caches, version 2.

    Everything as in version 1 (see its record), but the caches are only written, not returned.

    Attributes:
        k_cache_dtype: torch_npu's number of a dtype that torch lacks, when k_cache holds one; the
            host providers cannot read such caches.
        ckv_cache_dtype: The same for ckv_cache.

    Returns k_embed_out (B, 1, S, 64) and y_out (B, 1, S, 512).

    Source: torch_npu 2.13 schema and meta kernel of npu_kv_rmsnorm_rope_cache_v2.
    """

    k_cache_dtype: int | None = attrs.field(default=None, kw_only=True)
    ckv_cache_dtype: int | None = attrs.field(default=None, kw_only=True)
