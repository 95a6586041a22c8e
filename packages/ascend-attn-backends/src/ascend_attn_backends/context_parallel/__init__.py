"""Context parallelism: ranks share the keys of every request, and the tokens of every prompt."""

from .common import (
    AscendDCPLengths,
    AscendDCPMetadata,
    DCPImplMixin,
    DCPMetadataBuilderMixin,
    merge_shards,
)
from .dsa import (
    AscendDSADCPImpl,
    AscendDSADCPMetadata,
    AscendDSADCPMetadataBuilder,
    AscendDSAIndexerDCPImpl,
)
from .dsa_backend import (
    AscendDSADCPBackend,
)
from .group import (
    DCPGroup,
    SingleRankGroup,
    TorchDCPGroup,
)
from .mla import (
    AscendMlaDCPImpl,
    AscendMlaDCPMetadata,
    AscendMlaDCPMetadataBuilder,
    LatentRankStep,
)
from .mla_backend import (
    AscendMlaDCPBackend,
    AscendMlaPCPBackend,
)
from .mla_pcp import (
    AscendMlaPCPImpl,
    AscendMlaPCPMetadata,
    AscendMlaPCPMetadataBuilder,
)
from .prefill import (
    AscendPCPMetadata,
    PCPImplMixin,
    PCPMetadataBuilderMixin,
    PrefillShard,
    TokenSegment,
    segment_batch,
)
from .ranks import (
    RankMismatchError,
    ThreadDCPGroup,
    run_ranks,
)
from .sfa import (
    AscendSFADCPImpl,
    AscendSFADCPMetadata,
    AscendSFADCPMetadataBuilder,
    local_choice,
)
from .sfa_backend import (
    AscendSFADCPBackend,
    AscendSFAPCPBackend,
)
from .sfa_indexer import (
    AscendSFAIndexerDCPImpl,
    AscendSFAIndexerDCPMetadata,
    AscendSFAIndexerDCPMetadataBuilder,
)
from .sfa_pcp import (
    AscendSFAIndexerPCPImpl,
    AscendSFAIndexerPCPMetadata,
    AscendSFAIndexerPCPMetadataBuilder,
    AscendSFAPCPImpl,
    AscendSFAPCPMetadata,
    AscendSFAPCPMetadataBuilder,
)
from .shard import (
    ContextShard,
    sharded_batch,
)
from .standard import (
    AscendAttentionDCPImpl,
    AscendAttentionDCPMetadata,
    AscendAttentionDCPMetadataBuilder,
    KeyValueRankStep,
)
from .standard_backend import (
    AscendAttentionDCPBackend,
)
from .tokens import (
    per_token_batch,
)

__all__ = [
    "AscendAttentionDCPBackend",
    "AscendAttentionDCPImpl",
    "AscendAttentionDCPMetadata",
    "AscendAttentionDCPMetadataBuilder",
    "AscendDCPLengths",
    "AscendDCPMetadata",
    "AscendDSADCPBackend",
    "AscendDSADCPImpl",
    "AscendDSADCPMetadata",
    "AscendDSADCPMetadataBuilder",
    "AscendDSAIndexerDCPImpl",
    "AscendMlaDCPBackend",
    "AscendMlaDCPImpl",
    "AscendMlaDCPMetadata",
    "AscendMlaDCPMetadataBuilder",
    "AscendMlaPCPBackend",
    "AscendMlaPCPImpl",
    "AscendMlaPCPMetadata",
    "AscendMlaPCPMetadataBuilder",
    "AscendPCPMetadata",
    "AscendSFADCPBackend",
    "AscendSFADCPImpl",
    "AscendSFADCPMetadata",
    "AscendSFADCPMetadataBuilder",
    "AscendSFAIndexerDCPImpl",
    "AscendSFAIndexerDCPMetadata",
    "AscendSFAIndexerDCPMetadataBuilder",
    "AscendSFAIndexerPCPImpl",
    "AscendSFAIndexerPCPMetadata",
    "AscendSFAIndexerPCPMetadataBuilder",
    "AscendSFAPCPBackend",
    "AscendSFAPCPImpl",
    "AscendSFAPCPMetadata",
    "AscendSFAPCPMetadataBuilder",
    "ContextShard",
    "DCPGroup",
    "DCPImplMixin",
    "DCPMetadataBuilderMixin",
    "KeyValueRankStep",
    "LatentRankStep",
    "PCPImplMixin",
    "PCPMetadataBuilderMixin",
    "PrefillShard",
    "RankMismatchError",
    "SingleRankGroup",
    "ThreadDCPGroup",
    "TokenSegment",
    "TorchDCPGroup",
    "local_choice",
    "merge_shards",
    "per_token_batch",
    "run_ranks",
    "segment_batch",
    "sharded_batch",
]
