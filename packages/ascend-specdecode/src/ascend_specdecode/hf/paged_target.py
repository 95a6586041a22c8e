"""A causal model with ordinary attention as a target, over our standard backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import torch

from ascend_attn_backends import AscendAttentionBackendImpl, AttentionBatch
from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.hf.paged_attention import ATTENTION_NAME, paged_step, register_attention
from ascend_specdecode.hf.paged_cache import PagedCache
from ascend_specdecode.hf.rows import TokenRows
from ascend_specdecode.protocols import DraftedSequence, Scores


class PagedTarget:
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
        self._model = model.eval()
        self._hidden_states = hidden_states
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
        model.set_attn_implementation(ATTENTION_NAME)

    @property
    def vocabulary_size(self) -> int:
        """Tokens V that the model scores."""
        return int(self._model.config.vocab_size)

    async def score(self, batch: Sequence[DraftedSequence]) -> Scores:
        """Score the batch in a worker thread; see :class:`ascend_specdecode.Target`.

        Raises:
            TargetError: the cache is too small for some sequences.
        """
        rows = TokenRows.of(batch)
        ids = [row.sequence.sequence_id for row in batch]
        self.cache.reserve(dict(zip(ids, rows.ends, strict=True)))
        return await anyio.to_thread.run_sync(self._forward, rows, ids)

    @torch.inference_mode()
    def _forward(self, rows: TokenRows, ids: list[int]) -> Scores:
        batch = AttentionBatch.from_lengths(
            rows.counts, rows.ends, self.cache.block_size, block_table=self.cache.table(ids)
        )
        output = self._model(
            input_ids=rows.tokens[None],
            position_ids=rows.positions[None],
            use_cache=False,
            logits_to_keep=rows.scored,
            output_hidden_states=self._hidden_states,
            ascend_step=paged_step(self.cache, batch, self._impls),
        )
        hidden = None
        if self._hidden_states:
            hidden = output.hidden_states[-1][0].split(list(rows.counts))
        return Scores(rows.padded_logits(output.logits[0]), hidden)

    def roll_back(self, sequence_id: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence."""
        self.cache.keep(sequence_id, length)

    def free(self, sequence_id: int) -> None:
        """Give back all blocks of a sequence, known or not."""
        self.cache.keep(sequence_id, 0)


def _key_value_sizes(config: Any) -> tuple[int, int]:
    if getattr(config, "kv_lora_rank", None) is not None:
        found = f"{config.model_type}, latent attention"
        raise ArgumentError("model", found, "grouped keys and values; use CachedTarget")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, size
