"""Attention backends on an NPU: as in `adapters`, over caches as CANN's operators want them.

vLLM gives a layer one cache in which a token's value follows its key. The operators that write and
read paged caches take two tensors that are contiguous each. Both bases see to that in their way:
the standalone runner gives a layer memory of its own, in which all keys come before all values;
vllm-ascend's runner gives it a pair of caches.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from ascend_vllm_plugin.adapters.draft_flash import DraftFlashBackend, DraftFlashImpl
from ascend_vllm_plugin.adapters.latent import Caches
from ascend_vllm_plugin.adapters.mla import MLABackend, MLAImpl
from ascend_vllm_plugin.adapters.standard import StandardBackend, StandardImpl
from ascend_vllm_plugin.compat import NPU_BLOCK_SIZE


class NpuCaches:
    """What vLLM wants to know about the caches of every backend on an NPU."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Tokens per block where the user named none; vLLM's default is for other kernels."""
        return NPU_BLOCK_SIZE

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A layer's memory in one piece."""
        return (KVCacheLayout.LBHNC,)


class NpuStandardImpl(StandardImpl):
    """Translates a layer's calls; keys and values lie in one half of the layer's memory each."""

    def views_of(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [num_blocks, KN, block_size, D], token-major, of the memory of a layer.

        Args:
            kv_cache: [num_blocks, KN, block_size, 2 * D], contiguous: vLLM's layout LBHNC.
        """
        blocks, heads, block_size, _ = kv_cache.shape
        halves = kv_cache.view(2, blocks, block_size, heads, self.head_size).transpose(2, 3)
        return halves[0], halves[1]


class NpuStandardBackend(NpuCaches, StandardBackend):
    """The standard backend on an NPU."""

    impl_class: ClassVar[type[StandardImpl]] = NpuStandardImpl


class NpuMLAImpl(MLAImpl):
    """Translates an MLA layer's calls; latents come before rotary rows in the layer's memory."""

    def views_of(self, kv_cache: torch.Tensor) -> Caches:
        """Views [num_blocks, 1, block_size, 512 and 64], contiguous, of the memory of a layer.

        Args:
            kv_cache: [num_blocks, block_size, 576], contiguous: vLLM's layout LBHNC.
        """
        blocks, block_size, _ = kv_cache.shape
        sizes = (self.latent_size, self.rope_size)
        parts = kv_cache.view(-1).split([blocks * block_size * size for size in sizes])
        latent, rope = (
            part.view(blocks, 1, block_size, size) for part, size in zip(parts, sizes, strict=True)
        )
        return latent, rope


class NpuMLABackend(NpuCaches, MLABackend):
    """The latent backend on an NPU."""

    impl_class = NpuMLAImpl


class PairedCaches:
    """Caches of a layer under vllm-ascend's runner, which allocates keys and values apart."""

    def views_of(
        self, kv_cache: tuple[torch.Tensor, torch.Tensor] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [num_blocks, KN, block_size, D] of a pair [num_blocks, block_size, KN, D]."""
        return kv_cache[0].transpose(1, 2), kv_cache[1].transpose(1, 2)


class OverlayStandardImpl(PairedCaches, StandardImpl):  # type: ignore[misc]  # of vllm-ascend's pairs
    """Translates a layer's calls under vllm-ascend's runner."""


class OverlayDraftFlashImpl(PairedCaches, DraftFlashImpl):  # type: ignore[misc]  # as above
    """The same for a draft layer."""


class PairedCacheShape(NpuStandardBackend):
    """What vllm-ascend's runner wants to know to allocate a layer's caches."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *further: object
    ) -> tuple[int, int, int, int, int]:
        """Keys, then values: (2, num_blocks, block_size, KN, D)."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class OverlayStandardBackend(PairedCacheShape):
    """The standard backend under vllm-ascend's runner."""

    impl_class = OverlayStandardImpl


class OverlayDraftFlashBackend(PairedCacheShape, DraftFlashBackend):
    """The draft flash backend under vllm-ascend's runner."""

    impl_class = OverlayDraftFlashImpl
