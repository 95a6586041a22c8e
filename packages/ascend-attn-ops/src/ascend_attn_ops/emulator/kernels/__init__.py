"""CPU functions of the emulated aclnn operators; importing this package registers them.

Attention operators compute in float64, dense and written apart from this package's providers, so
that a provider that is compared through the emulator is compared with something else.
"""

from . import (
    cache_ops,
    elementwise,
    flash_attention_score,
    flash_attn,
    fused_infer_attention_score,
    indexing,
    lightning_indexer,
    linear,
    merging,
    mla_prolog,
    random_numbers,
    reductions,
    rotary,
    sparse_flash_attention,
)

__all__ = [
    "cache_ops",
    "elementwise",
    "flash_attention_score",
    "flash_attn",
    "fused_infer_attention_score",
    "indexing",
    "lightning_indexer",
    "linear",
    "merging",
    "mla_prolog",
    "random_numbers",
    "reductions",
    "rotary",
    "sparse_flash_attention",
]
