"""Any causal model with a cache that can be cropped as a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import anyio.to_thread
import torch

from ascend_specdecode.hf.caches import SequenceCaches
from ascend_specdecode.hf.rows import TokenRows, tree_mask
from ascend_specdecode.protocols import DraftedSequence, Scores

_TAKE_A_MASK: Final = {"full_attention", "indexed_attention"}
"""Kinds of layers, in transformers' words, that see what a mask lets them see."""


class CachedTarget:
    """Scores sequence after sequence with the model's own attention, a cache for each.

    Going back to a shorter length crops the cache, which keeps views and copies nothing. Trees are
    scored with an attention mask of their own, where no layer has a sliding window.

    Args:
        model: a causal language model; it is switched to evaluation.
        hidden_states: also return the hidden states after the final norm.
    """

    def __init__(self, model: Any, *, hidden_states: bool = False) -> None:
        self._model = model.eval()
        self._hidden_states = hidden_states
        self._caches = SequenceCaches(model.config)

    @property
    def vocabulary_size(self) -> int:
        """Tokens V that the model scores."""
        return int(self._model.config.vocab_size)

    @property
    def scores_trees(self) -> bool:
        """Whether a mask of its own can say who sees whom: no layer makes its own window."""
        config = self._model.config
        kinds = getattr(config, "layer_types", None)
        if kinds:
            return set(kinds) <= _TAKE_A_MASK
        return getattr(config, "sliding_window", None) is None

    @property
    def sequences(self) -> frozenset[int]:
        """Sequences that hold a cache."""
        return self._caches.sequences

    async def score(self, batch: Sequence[DraftedSequence]) -> Scores:
        """Score the batch in a worker thread; see :class:`ascend_specdecode.Target`."""
        return await anyio.to_thread.run_sync(self._forward, batch)

    @torch.inference_mode()
    def _forward(self, batch: Sequence[DraftedSequence]) -> Scores:
        rows = TokenRows.of(batch)
        parts = zip(
            batch,
            rows.tokens.split(list(rows.counts)),
            rows.positions.split(list(rows.counts)),
            rows.scored_counts,
            strict=True,
        )
        outputs = [self._one(row, *part) for row, *part in parts]
        hidden = (
            [output.hidden_states[-1][0] for output in outputs] if self._hidden_states else None
        )
        logits = torch.cat(
            [
                output.logits[0, output.logits.shape[1] - count :]
                for output, count in zip(outputs, rows.scored_counts, strict=True)
            ]
        )
        return Scores(rows.padded_logits(logits), hidden)

    def _one(
        self, row: DraftedSequence, tokens: torch.Tensor, positions: torch.Tensor, scored: int
    ) -> Any:
        cache = self._caches.at(row.sequence.sequence_id, row.cached_length)
        return self._model(
            input_ids=tokens[None],
            attention_mask=tree_mask(row, self._model.dtype),
            position_ids=positions[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=max(scored, 1),
            output_hidden_states=self._hidden_states,
        )

    def roll_back(self, sequence_id: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence."""
        self._caches.crop(sequence_id, length)

    def free(self, sequence_id: int) -> None:
        """Drop the cache of a sequence, known or not."""
        self._caches.free(sequence_id)
