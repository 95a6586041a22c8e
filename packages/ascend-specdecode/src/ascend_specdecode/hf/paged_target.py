"""A causal model with ordinary attention as a target, over our standard backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_attn_backends import AscendAttentionBackendImpl, AttentionBatch
from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.hf.paged_attention import ATTENTION_NAME, paged_step, register_attention
from ascend_specdecode.hf.paged_cache import PagedCache
from ascend_specdecode.hf.paged_scoring import PagedScoring


class PagedTarget(PagedScoring):
    """Scores all sequences of a step in one forward pass of T packed tokens.

    Going back to a shorter length gives blocks back; nothing is copied. It scores no trees: the
    attention operators that the backend calls take a mask mode (causal, window), not a mask for
    each sequence. :class:`CachedTarget` does.

    Args:
        model: a causal language model whose attention goes through transformers' attention
            interface with grouped keys and values (Llama, Mistral, Qwen2, Qwen3 ...). It is
            switched to the attention of this package and to evaluation.
        num_tokens: how many tokens fit into the cache.
        block_size: tokens per cache block.
        hidden_states: also return the hidden states after the final norm.

    Raises:
        ArgumentError: the model's configuration does not describe such attention.
    """

    def __init__(
        self,
        model: Any,
        num_tokens: int = 8192,
        *,
        block_size: int = 16,
        hidden_states: bool = False,
    ) -> None:
        register_attention()
        self._impls: dict[tuple[int, int | None], AscendAttentionBackendImpl] = {}
        heads, head_size = _key_value_sizes(model.config)
        self.cache = PagedCache(
            model.config.num_hidden_layers,
            heads,
            head_size,
            num_tokens,
            block_size=block_size,
            dtype=model.dtype,
        )
        super().__init__(model, self.cache, hidden_states=hidden_states)
        model.set_attn_implementation(ATTENTION_NAME)

    def step_arguments(self, batch: AttentionBatch) -> Mapping[str, Any]:
        """The step, with the metadata of all layers."""
        return {"ascend_step": paged_step(self.cache, batch, self._impls)}


def _key_value_sizes(config: Any) -> tuple[int, int]:
    if getattr(config, "kv_lora_rank", None) is not None:
        found = f"{config.model_type}, latent attention"
        allowed = "grouped keys and values; use SparseTarget or CachedTarget"
        raise ArgumentError("model", found, allowed)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, size
