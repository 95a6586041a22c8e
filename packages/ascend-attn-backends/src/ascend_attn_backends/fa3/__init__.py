"""The FA3 backend: the flash attention that training uses, over a paged KV cache."""

from .backend import AscendFABackend
from .builder import AscendFAMetadataBuilder
from .impl import AscendFAImpl
from .metadata import AscendFAMetadata

__all__ = [
    "AscendFABackend",
    "AscendFAImpl",
    "AscendFAMetadata",
    "AscendFAMetadataBuilder",
]
