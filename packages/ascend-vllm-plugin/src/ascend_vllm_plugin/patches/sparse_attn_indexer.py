"""The choice of keys by our indexer.

vLLM's `SparseAttnIndexer` has kernels for CUDA, ROCm and XPU, and on a CPU only those of
DeepSeek-V4 over its own cache; for DeepSeek-V3.2 and GLM-5 it stops.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

from ascend_vllm_plugin.adapters.indexer import KeyChooser, choose_keys
from ascend_vllm_plugin.patches.replacement import replace_layer


class AscendSparseAttnIndexer(SparseAttnIndexer):
    """`SparseAttnIndexer` that calls ascend-attn-backends."""

    def __init__(self, k_cache: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        super().__init__(k_cache, *args, **kwargs)
        heads = get_current_vllm_config().model_config.hf_text_config.index_n_heads
        chooser = KeyChooser(k_cache.prefix, heads, self.head_dim, self.topk_tokens)
        self.scaled_weights, k_cache.chooser = chooser.layer.scaled_weights, chooser

    def forward_native(
        self,
        hidden_states: torch.Tensor,
        q_quant: Any,
        k: Any,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Choose the keys of each token.

        Args:
            hidden_states: unused.
            q_quant: [T, num_heads, index_size] index queries, not quantised.
            k: [T, index_size] index rows.
            weights: [T, num_heads] weights of the heads as the model computes them.

        Returns:
            The buffer with the choice, [max_num_tokens, top_k] int32.
        """
        weights, name = self.scaled_weights(weights), self.k_cache.prefix
        choose_keys(q_quant, k, weights, self.topk_indices_buffer, name)
        return self.topk_indices_buffer

    forward_cpu = forward_native


def apply() -> bool:
    """Put the class in the place of vLLM's."""
    replace_layer(SparseAttnIndexer, AscendSparseAttnIndexer)
    return True
