"""What targets over a paged cache share: one forward pass of packed tokens for a whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio.to_thread
import torch

from ascend_attn_backends import AttentionBatch
from ascend_specdecode.hf.paged_cache import BlockPool
from ascend_specdecode.hf.rows import TokenRows
from ascend_specdecode.protocols import DraftedSequence, Scores


class PagedScoring:
    """Scores all sequences of a step in one forward pass of T packed tokens.

    A subclass makes the model's attention read the step that travels as a keyword argument of the
    model's ``forward``, so nothing is kept between calls.

    Args:
        model: a causal language model; it is switched to evaluation.
        pool: who has which blocks.
        hidden_states: also return the hidden states after the final norm.
    """

    def __init__(self, model: Any, pool: BlockPool, *, hidden_states: bool) -> None:
        self._model = model.eval()
        self._pool = pool
        self._hidden_states = hidden_states

    @property
    def vocabulary_size(self) -> int:
        """Tokens V that the model scores."""
        return int(self._model.config.vocab_size)

    @property
    def sequences(self) -> frozenset[int]:
        """Sequences that hold blocks."""
        return self._pool.sequences

    async def score(self, batch: Sequence[DraftedSequence]) -> Scores:
        """Score the batch in a worker thread; see :class:`ascend_specdecode.Target`.

        Raises:
            TargetError: the cache is too small for some sequences.
        """
        rows = TokenRows.of(batch)
        ids = [row.sequence.sequence_id for row in batch]
        self._pool.reserve(dict(zip(ids, rows.ends, strict=True)))
        return await anyio.to_thread.run_sync(self._forward, rows, ids)

    def step_arguments(self, batch: AttentionBatch) -> Mapping[str, Any]:
        """Return what ``forward`` of the model is given for a step."""
        raise NotImplementedError

    @torch.inference_mode()
    def _forward(self, rows: TokenRows, ids: list[int]) -> Scores:
        batch = AttentionBatch.from_lengths(
            rows.counts, rows.ends, self._pool.block_size, block_table=self._pool.table(ids)
        )
        output = self._model(
            input_ids=rows.tokens[None],
            position_ids=rows.positions[None],
            use_cache=False,
            logits_to_keep=rows.scored,
            output_hidden_states=self._hidden_states,
            **self.step_arguments(batch),
        )
        hidden = None
        if self._hidden_states:
            hidden = output.hidden_states[-1][0].split(list(rows.counts))
        return Scores(rows.padded_logits(output.logits[0]), hidden)

    def roll_back(self, sequence_id: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence."""
        self._pool.keep(sequence_id, length)

    def free(self, sequence_id: int) -> None:
        """Give back all blocks of a sequence, known or not."""
        self._pool.keep(sequence_id, 0)
