"""An indexer that does not quantise.

vLLM's `Indexer` quantises its queries to fp8 with a kernel that a CPU does not have, and folds
their scales into the weights of the heads. The operators for Ascend take queries in the dtype of
the model. The class is not pluggable, so its name in the module that builds it is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models import deepseek_v2

from ascend_vllm_plugin.patches.replacement import replace_name


class AscendIndexer(deepseek_v2.Indexer):  # type: ignore[misc]
    """`Indexer` of DeepSeek-V3.2 and GLM-5 in the dtype of the model."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        qr: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: Any,
    ) -> torch.Tensor:
        """Choose the keys of each token.

        Args:
            hidden_states: [T, hidden_size].
            qr: [T, q_lora_rank], the compressed queries of the layer.
            positions: [T].
            rotary_emb: rotation in the style of the model's indexer.

        Returns:
            The buffer with the choice, [max_num_tokens, top_k].
        """
        query = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        key, weights = self.wk_weights_proj(hidden_states)[0].split(
            [self.head_dim, self.n_head], dim=-1
        )
        key = self.k_norm(key)[:, None]
        rope = self.rope_dim
        query_rope, key_rope = rotary_emb(positions, query[..., :rope], key[..., :rope])
        query = torch.cat([query_rope.view_as(query[..., :rope]), query[..., rope:]], -1)
        key = torch.cat([key_rope.view_as(key[..., :rope]), key[..., rope:]], -1)
        return self.indexer_op(hidden_states, query, key[:, 0], weights)


def apply() -> bool:
    """Put the class in the place of vLLM's."""
    replace_name(deepseek_v2, AscendIndexer, "Indexer")
    return True
