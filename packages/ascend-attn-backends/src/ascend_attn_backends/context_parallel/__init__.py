"""Decode context parallelism: the keys of every request are spread over ranks."""

from .common import (
    AscendDCPMetadata,
    DCPImplMixin,
    DCPMetadataBuilderMixin,
    merge_shards,
)
from .group import DCPGroup, SingleRankGroup, TorchDCPGroup
from .mla import (
    AscendMlaDCPImpl,
    AscendMlaDCPMetadata,
    AscendMlaDCPMetadataBuilder,
    LatentRankStep,
    forward_mqa_over_shards,
)
from .mla_backend import AscendMlaDCPBackend
from .shard import ContextShard, sharded_batch
from .tokens import per_token_batch

__all__ = [
    "AscendDCPMetadata",
    "AscendMlaDCPBackend",
    "AscendMlaDCPImpl",
    "AscendMlaDCPMetadata",
    "AscendMlaDCPMetadataBuilder",
    "ContextShard",
    "DCPGroup",
    "DCPImplMixin",
    "DCPMetadataBuilderMixin",
    "LatentRankStep",
    "SingleRankGroup",
    "TorchDCPGroup",
    "forward_mqa_over_shards",
    "merge_shards",
    "per_token_batch",
    "sharded_batch",
]
