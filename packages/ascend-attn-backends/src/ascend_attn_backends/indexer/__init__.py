"""The indexer of sparse latent attention: which keys each token attends to."""

from .backend import AscendSFAIndexerBackend
from .builder import AscendSFAIndexerMetadataBuilder
from .impl import AscendSFAIndexerImpl
from .metadata import AscendSFAIndexerMetadata
from .rope import IndexRope, rotate_index_rows
from .top_k import IndexGroup, StaleSelectionError, TopKBuffer, index_groups

__all__ = [
    "AscendSFAIndexerBackend",
    "AscendSFAIndexerImpl",
    "AscendSFAIndexerMetadata",
    "AscendSFAIndexerMetadataBuilder",
    "IndexGroup",
    "IndexRope",
    "StaleSelectionError",
    "TopKBuffer",
    "index_groups",
    "rotate_index_rows",
]
