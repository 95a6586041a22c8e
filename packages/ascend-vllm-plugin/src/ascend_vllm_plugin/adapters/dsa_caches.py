"""Caches of DeepSeek-V4 in the form that our operators read, for vLLM's memory.

A layer has up to five caches, each in a group of blocks of its own: the window (one row per token),
compressed keys and index keys (one row per `ratio` tokens), and the states of both compressors. All
blocks have the same number of bytes, so that any group may take any block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

from ascend_attn_backends import AscendDSAMetadata, AttentionBatch
from ascend_vllm_plugin.adapters.latent import LatentBackend
from ascend_vllm_plugin.adapters.steps import StepMetadataBuilder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend, AttentionImplBase


@attrs.frozen(eq=False)
class CacheStep:
    """A step as one group of caches sees it.

    Attributes:
        batch: The step with the blocks and slots of this group.
        built: Metadata of layers, by what it was built for; layers of one kind share it.
    """

    batch: AttentionBatch
    built: dict[Any, AscendDSAMetadata] = attrs.field(factory=dict)

    def once(self, kind: Any, build: Callable[[], AscendDSAMetadata]) -> AscendDSAMetadata:
        """What was built for this kind of layer, or what `build` makes now."""
        if kind not in self.built:
            self.built[kind] = build()
        return self.built[kind]


@attrs.frozen
class CacheStepBuilder:
    """What is known of a step when only one of a layer's caches is: its batch."""

    block_size: int

    def build(self, batch: AttentionBatch) -> CacheStep:
        """The step of a group."""
        return CacheStep(batch)


class CacheMetadataBuilder(StepMetadataBuilder):
    """Translates a step for one group of caches."""

    step_builder = CacheStepBuilder


class DSABackend(LatentBackend):
    """What vLLM wants to know about the caches of these layers."""

    builder_class = CacheMetadataBuilder

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImplBase[Any]]:
        """vLLM's model has a layer instead."""
        raise NotImplementedError("DeepSeek-V4 has an attention layer of its own")

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        """Blocks are read as they are."""
        return [MultipleOf(1)]


def block_bytes(vllm_config: VllmConfig, head_size: int) -> int:
    """Bytes of a block of every cache: so many rows of keys as the user's blocks have tokens."""
    dtype: Any = vllm_config.model_config.dtype
    return int(vllm_config.cache_config.block_size * head_size * dtype.itemsize)


class WindowCache(DeepseekV4SWACache):
    """Rows of the sliding window."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """One row per token."""
        return SlidingWindowMLASpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.head_dim,
            dtype=self.dtype,
            sliding_window=self.window_size,
        )


class StateCache(CompressorStateCache):
    """Values and scores of the tokens that a compressor still needs, float32."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """One state per token."""
        return SlidingWindowMLASpec(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=self.state_dim,
            dtype=self.dtype,
            sliding_window=self.sliding_window,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Ours."""
        return DSABackend


class IndexCache(DeepseekV4IndexerCache):
    """Rows of index keys.

    Attributes:
        bytes_per_block: of every cache of the layer; fewer rows than these would fit are used.
    """

    bytes_per_block: int

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """One row per compressed key."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size * self.compress_ratio,
            num_kv_heads=1,
            head_size=self.head_dim,
            dtype=self.dtype,
            tokens_per_state=self.compress_ratio,
            page_size_padded=self.bytes_per_block,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Ours."""
        return DSABackend
