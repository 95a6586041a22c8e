"""A glm_moe_dsa model as a target, over our indexer and sparse latent backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ascend_attn_backends import AttentionBatch
from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.hf.paged_cache import SparseCache
from ascend_specdecode.hf.paged_scoring import PagedScoring
from ascend_specdecode.hf.sparse_attention import SparseAttention, SparseStep

_SIZES: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
"""What the operators take, see the contracts of ascend-attn-ops."""


class SparseTarget(PagedScoring):
    """Scores all sequences of a step in one forward pass, with the attention of this project.

    Going back to a shorter length gives blocks back; nothing is copied. As :class:`PagedTarget` it
    scores no trees.

    Args:
        model: ``GlmMoeDsaForCausalLM``. The ``forward`` of its attention modules is replaced, and
            it is switched to evaluation: load another one for other uses.
        num_tokens: how many tokens fit into the cache.
        block_size: tokens per cache block.
        hidden_states: also return the hidden states after the final norm.

    Raises:
        ArgumentError: it is another model, or of sizes that the operators do not take.
    """

    def __init__(
        self,
        model: Any,
        num_tokens: int = 8192,
        *,
        block_size: int = 16,
        hidden_states: bool = False,
    ) -> None:
        config = model.config
        if not self.takes(config):
            found = {name: getattr(config, name, None) for name in _SIZES}
            allowed = f"glm_moe_dsa with {_SIZES}"
            raise ArgumentError("model", f"{config.model_type} with {found}", allowed)
        self.cache = SparseCache(
            config.num_hidden_layers, num_tokens, block_size=block_size, dtype=model.dtype
        )
        super().__init__(model, self.cache, hidden_states=hidden_states)
        for layer in model.model.layers:
            layer.self_attn.forward = SparseAttention(layer.self_attn)

    @staticmethod
    def takes(config: Any) -> bool:
        """Whether a model of this configuration can be the target."""
        found = {name: getattr(config, name, None) for name in _SIZES}
        return bool(config.model_type == "glm_moe_dsa" and found == _SIZES)

    def step_arguments(self, batch: AttentionBatch) -> Mapping[str, Any]:
        """The step, with the metadata of all layers; the masks of transformers are not wanted."""
        step = SparseStep.of(self.cache, batch)
        return {"ascend_step": step, "attention_mask": {"indexed_attention": None}}
