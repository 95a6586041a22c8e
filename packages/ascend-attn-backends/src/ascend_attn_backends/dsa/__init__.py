"""The compressed backend: attention over a sliding window and compressed keys (DeepSeek-V4)."""

from .backend import AscendDSABackend, AscendDSAIndexerBackend
from .builder import AscendDSAMetadataBuilder
from .compression import DsaCompression
from .compressor import AscendDSACompressor, CompressorWeights
from .impl import AscendDSAImpl
from .indexer import AscendDSAIndexerImpl
from .layout import NULL_STATE_BLOCK, CompressorStateShape, DsaCacheShape
from .metadata import AscendDSAMetadata, CompressedStep, CompressorRows, IndexRows
from .steps import DsaTables

__all__ = [
    "NULL_STATE_BLOCK",
    "AscendDSABackend",
    "AscendDSACompressor",
    "AscendDSAImpl",
    "AscendDSAIndexerBackend",
    "AscendDSAIndexerImpl",
    "AscendDSAMetadata",
    "AscendDSAMetadataBuilder",
    "CompressedStep",
    "CompressorRows",
    "CompressorStateShape",
    "CompressorWeights",
    "DsaCacheShape",
    "DsaCompression",
    "DsaTables",
    "IndexRows",
]
