"""A small causal model as the model of a :class:`~ascend_specdecode.ModelDrafter`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import torch

from ascend_specdecode.drafters.models import DraftInput
from ascend_specdecode.hf.caches import SequenceCaches


class CausalDraftModel:
    """Runs a causal language model, a cache for each sequence.

    Args:
        model: the model; it is switched to evaluation.
    """

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._caches = SequenceCaches(model.config)

    @property
    def sequences(self) -> frozenset[int]:
        """Sequences that a cache is held for."""
        return self._caches.sequences

    async def next_logits(self, rows: Sequence[DraftInput]) -> torch.Tensor:
        """Compute the rows in a worker thread; see ``DraftModel``."""
        return await anyio.to_thread.run_sync(self._compute, rows)

    @torch.inference_mode()
    def _compute(self, rows: Sequence[DraftInput]) -> torch.Tensor:
        return torch.cat([self._row(row) for row in rows])

    def _row(self, row: DraftInput) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=torch.tensor(row.tokens)[None],
            position_ids=torch.arange(row.start, row.end)[None],
            cache=self._caches.at(row.sequence_id, row.start),
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[0]

    def free(self, sequence_id: int) -> None:
        """Drop the cache of a sequence, known or not."""
        self._caches.free(sequence_id)
