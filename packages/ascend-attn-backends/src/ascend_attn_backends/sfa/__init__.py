"""The sparse latent backend: absorbed latent attention over the keys that an indexer chose."""

from .backend import AscendSFABackend
from .builder import AscendSFAMetadataBuilder
from .impl import AscendSFAImpl
from .metadata import AscendSFAMetadata

__all__ = [
    "AscendSFABackend",
    "AscendSFAImpl",
    "AscendSFAMetadata",
    "AscendSFAMetadataBuilder",
]
