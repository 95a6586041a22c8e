"""The compressed backend's identity: its parts, its caches, and what it refuses."""

from __future__ import annotations

from typing import Any, ClassVar

from ascend_attn_ops import Refusal
from ascend_hwprofile import Capability, HardwareProfile

from ..latent_layout import KERNEL_BLOCK_MULTIPLE, kernel_block_size_for
from ..request import BackendRequest
from ..selection import unmet_demands
from ..sparse_refusals import operator_refusals, plain_cache_refusals, tensor
from .builder import AscendDSAMetadataBuilder, mask_arguments
from .compression import ROPE_SIZE, WINDOW, DsaCompression
from .impl import AscendDSAImpl
from .indexer import AscendDSAIndexerImpl
from .layout import DsaCacheShape
from .metadata import AscendDSAMetadata

_HIDDEN_SIZE = 4096  # of DeepSeek-V4-Flash; a request does not know the width of its model


class AscendDSABackend:
    """Shared-key attention over a sliding window and compressed keys (DeepSeek-V4).

    One backend for the three kinds of layers: the window alone, all compressed keys, and those
    that an indexer (:class:`AscendDSAIndexerBackend`) chooses. A2 and 310P are refused, simulated
    too: they have no compressor, so a simulation would show what cannot run.
    """

    name: ClassVar[str] = "dsa"
    metadata_class: ClassVar[type[AscendDSAMetadata]] = AscendDSAMetadata
    builder_class: ClassVar[type[AscendDSAMetadataBuilder]] = AscendDSAMetadataBuilder
    impl_class: ClassVar[type[AscendDSAImpl]] = AscendDSAImpl

    @staticmethod
    def cache_shape(
        num_blocks: int, block_size: int, compression: DsaCompression | None = None
    ) -> DsaCacheShape:
        """Geometry of the caches of a layer; :func:`get_dsa_attn_kv_plan` has those of a model."""
        return DsaCacheShape.of_layer(num_blocks, block_size, compression)

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why this backend does not take the request; empty when it does.

        ``request.head_size`` is the width of a cached key, 512. Limits of the product come from the
        contracts of the operators, for the smallest step.
        """
        refusals = unmet_demands(cls.name, request)
        refusals += plain_cache_refusals(cls.name, request)
        refusals += _compression_refusals(cls.name, request)
        if refusals:
            return refusals
        return operator_refusals(
            cls.name, Capability.DSA, request, profile, _smallest_step(request)
        )


class AscendDSAIndexerBackend:
    """Choice of compressed keys for :class:`AscendDSABackend`, over a cache of index keys.

    It is no attention layer of its own, so the table of attention layers does not list it; ask
    :meth:`refusals` with the index heads as ``num_heads`` and 128 as ``head_size``.
    """

    name: ClassVar[str] = "dsa_indexer"
    metadata_class: ClassVar[type[AscendDSAMetadata]] = AscendDSAMetadata
    builder_class: ClassVar[type[AscendDSAMetadataBuilder]] = AscendDSAMetadataBuilder
    impl_class: ClassVar[type[AscendDSAIndexerImpl]] = AscendDSAIndexerImpl

    @classmethod
    def refusals(cls, request: BackendRequest, profile: HardwareProfile) -> list[Refusal]:
        """Every reason why the indexer does not take the request; empty when it does."""
        refusals = plain_cache_refusals(cls.name, request)
        refusals += _compression_refusals(cls.name, request)
        if refusals:
            return refusals
        calls = {
            "lightning_indexer": _choice(request),
            "compressor": _compressor(request, _compression(request)),
            "scatter_pa_kv_cache": _write(request),
        }
        return operator_refusals(cls.name, Capability.DSA, request, profile, calls)


def _compression(request: BackendRequest) -> DsaCompression | None:
    if request.compress_ratio == 1:
        return None
    return DsaCompression(request.compress_ratio, request.compressed_top_k)


def _compression_refusals(name: str, request: BackendRequest) -> list[Refusal]:
    """A refusal when the choice of keys and the keys do not go together."""
    found, allowed = str(request.compressed_top_k), None
    if request.compress_ratio == 1 and request.compressed_top_k is not None:
        allowed = "None where compress_ratio is 1: there are no keys to choose from"
    if name == AscendDSAIndexerBackend.name and request.compressed_top_k is None:
        allowed = "a number of keys: a layer without one has no indexer"
    if allowed is None:
        return []
    source = "transformers models/deepseek_v4/configuration_deepseek_v4.py: layer_types, index_topk"
    return [Refusal(f"{name}.compressed_top_k", "compressed_top_k", found, allowed, source)]


def _kernel_block(request: BackendRequest) -> int:
    size = request.block_size
    return size if size % KERNEL_BLOCK_MULTIPLE else kernel_block_size_for(size)


def _lengths(count: int = 1) -> dict[str, Any]:
    return {"shape": [count], "dtype": "int32"}


def _table() -> dict[str, Any]:
    return {"shape": [1, 1], "dtype": "int32"}


def _smallest_step(request: BackendRequest) -> dict[str, dict[str, Any]]:
    """Arguments of the operators for one request with one token, as data."""
    compression = _compression(request)
    calls = {"sparse_flash_mla": _attention(request, compression)}
    if compression is not None:
        calls["compressor"] = _compressor(request, compression)
    return {**calls, "scatter_pa_kv_cache": _write(request)}


def _attention(request: BackendRequest, compression: DsaCompression | None) -> dict[str, Any]:
    cache = tensor(request, 1, _kernel_block(request), request.num_kv_heads, request.head_size)
    call = {
        "q": tensor(request, 1, request.num_heads, request.head_size),
        "ori_kv": cache,
        "ori_block_table": _table(),
        "cu_seqlens_q": _lengths(2),
        "seqused_ori_kv": _lengths(),
        "sinks": {"shape": [request.num_heads], "dtype": "float32"},
        "metadata": _lengths(1024),
        "softmax_scale": request.head_size**-0.5,
        "layout_q": "TND",
        "layout_kv": "PA_BBND",
        **mask_arguments(request.sliding_window or WINDOW, None),
    }
    if compression is None:
        return call
    call |= {
        "cmp_kv": cache,
        "cmp_block_table": _table(),
        "seqused_cmp_kv": _lengths(),
        "cmp_residual_kv": _lengths(),
        "cmp_ratio": compression.ratio,
        "cmp_mask_mode": 3,
    }
    if compression.top_k is not None:
        call["cmp_sparse_indices"] = {"shape": [1, 1, compression.top_k], "dtype": "int32"}
    return call


def _compressor(request: BackendRequest, compression: DsaCompression | None) -> dict[str, Any]:
    assert compression is not None  # noqa: S101 - asked for compressing layers only
    width = compression.coff * request.head_size
    state = {"shape": [2, _kernel_block(request), width], "dtype": "float32"}
    rope = tensor(request, 1, ROPE_SIZE)
    return {
        "x": tensor(request, 1, _HIDDEN_SIZE),
        "wkv": tensor(request, width, _HIDDEN_SIZE),
        "wgate": tensor(request, width, _HIDDEN_SIZE),
        "kv_state": state,
        "score_state": state,
        "ape": {"shape": [compression.ratio, width], "dtype": "float32"},
        "norm_weight": tensor(request, request.head_size),
        "rope_sin": rope,
        "rope_cos": rope,
        "kv_block_table": _table(),
        "score_block_table": _table(),
        "cu_seqlens": _lengths(2),
        "start_pos": _lengths(),
        "rope_head_dim": ROPE_SIZE,
        "cmp_ratio": compression.ratio,
        "coff": compression.coff,
        "rotary_mode": 2,
    }


def _choice(request: BackendRequest) -> dict[str, Any]:
    size = request.head_size
    return {
        "query": tensor(request, 1, request.num_heads, size),
        "key": tensor(request, 1, _kernel_block(request), request.num_kv_heads, size),
        "weights": tensor(request, 1, request.num_heads),
        "actual_seq_lengths_query": _lengths(),
        "actual_seq_lengths_key": _lengths(),
        "block_table": _table(),
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": request.compressed_top_k,
        "sparse_mode": 3,
    }


def _write(request: BackendRequest) -> dict[str, Any]:
    row = tensor(request, 1, request.num_kv_heads, request.head_size)
    cache = tensor(request, 1, _kernel_block(request), request.num_kv_heads, request.head_size)
    return {
        "key": row,
        "value": row,
        "key_cache": cache,
        "value_cache": cache,
        "slot_mapping": {"shape": [1], "dtype": "int64"},
        "cache_mode": "Norm",
    }
