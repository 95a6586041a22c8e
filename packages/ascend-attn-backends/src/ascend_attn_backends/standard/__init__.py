"""The standard backend: grouped-query and multi-head attention over a paged KV cache."""

from .backend import AscendAttentionBackend
from .builder import AscendAttentionMetadataBuilder
from .impl import AscendAttentionBackendImpl
from .metadata import AscendMetadata, AttentionLaunch

__all__ = [
    "AscendAttentionBackend",
    "AscendAttentionBackendImpl",
    "AscendAttentionMetadataBuilder",
    "AscendMetadata",
    "AttentionLaunch",
]
