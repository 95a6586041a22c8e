"""Rotation of queries that come as [tokens, heads, size].

vLLM's C++ kernel for CPUs takes queries as [tokens, heads * size]. MLA layers hand in a part of
each head, a strided view [tokens, heads, size], and the kernel then rotates other elements than it
should, so that a DeepSeek-V3 with more than one head writes nonsense on a CPU. Such calls go to
vLLM's own PyTorch form here; all others keep the kernel.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from ascend_vllm_plugin.patches.replacement import replace_layer


class AscendRotaryEmbedding(RotaryEmbedding):
    """`RotaryEmbedding`, right for queries and keys of three dimensions as well."""

    def forward_cpu(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate queries [T, N * D] or [T, N, D], and keys likewise, by their positions [T]."""
        if query.dim() > 2:
            return self.forward_native(positions, query, key)
        return super().forward_cpu(positions, query, key)


def apply() -> bool:
    """Put the class in the place of vLLM's."""
    replace_layer(RotaryEmbedding, AscendRotaryEmbedding)
    return True
