"""The latent backend: absorbed multi-head latent attention over a paged cache."""

from .backend import AscendMLABackend
from .builder import AscendMLAMetadataBuilder
from .cache_size import CacheBytesPerToken, cache_bytes_per_token
from .impl import AscendMLAImpl
from .metadata import AscendMLAMetadata

__all__ = [
    "AscendMLABackend",
    "AscendMLAImpl",
    "AscendMLAMetadata",
    "AscendMLAMetadataBuilder",
    "CacheBytesPerToken",
    "cache_bytes_per_token",
]
