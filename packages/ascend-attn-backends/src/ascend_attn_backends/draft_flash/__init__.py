"""The draft backend: flash_attn with device lengths and shared plans, for draft layers on A5."""

from .backend import AscendFlashAttentionBackend
from .builder import AscendFlashAttentionMetadataBuilder
from .impl import AscendFlashAttentionImpl
from .metadata import AscendFlashAttentionMetadata
from .steps import DraftStep, draft_step, keep_accepted

__all__ = [
    "AscendFlashAttentionBackend",
    "AscendFlashAttentionImpl",
    "AscendFlashAttentionMetadata",
    "AscendFlashAttentionMetadataBuilder",
    "DraftStep",
    "draft_step",
    "keep_accepted",
]
