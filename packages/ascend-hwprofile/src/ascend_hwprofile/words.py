"""The vocabulary of this package: families, capabilities, confidence."""

from __future__ import annotations

import enum


class Family(enum.StrEnum):
    """A generation of Ascend hardware that shares one NPU architecture and one set of operators."""

    A2 = "A2"
    A3 = "A3"
    A5 = "A5"
    ATLAS_310P = "310P"
    ATLAS_310B = "310B"
    GEN1 = "gen1"


class Capability(enum.StrEnum):
    """A named ability that code may ask a profile for. ``data/capabilities.toml`` defines each."""

    DEVICE_LENGTH_FLASH_ATTN = "device_length_flash_attn"
    FUSED_INFER_ATTENTION = "fused_infer_attention"
    PAGED_ATTENTION = "paged_attention"
    MLA = "mla"
    SPARSE_FLASH_ATTENTION = "sparse_flash_attention"
    LIGHTNING_INDEXER = "lightning_indexer"
    QUANT_LIGHTNING_INDEXER = "quant_lightning_indexer"
    KV_QUANT_SPARSE_FLASH_ATTENTION = "kv_quant_sparse_flash_attention"
    DSA = "dsa"
    ATTENTION_UPDATE = "attention_update"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    HIFLOAT8 = "hifloat8"
    MX_FORMATS = "mx_formats"
    INT8_CUBE = "int8_cube"
    INT4_CUBE = "int4_cube"
    STRUCTURED_SPARSITY = "structured_sparsity"
    SPLIT_VECTOR_CORE = "split_vector_core"
    INTER_CORE_SYNC = "inter_core_sync"
    DIRECT_CUBE_TO_VECTOR = "direct_cube_to_vector"
    SIMT = "simt"
    SELECTABLE_INF_NAN = "selectable_inf_nan"
    HARDWARE_SUBNORMALS = "hardware_subnormals"
    ACLNN_ONLY = "aclnn_only"
    STRIDED_PAGED_CACHE = "strided_paged_cache"
    SPARSE_ATTENTION_SINKS = "sparse_attention_sinks"


class Confidence(enum.StrEnum):
    """How far a figure can be trusted."""

    VENDOR = "vendor"
    DERIVED = "derived"
    PRESS = "press"
    UNVERIFIED = "unverified"
