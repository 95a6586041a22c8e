"""A target's own MTP layer as the model of a :class:`~ascend_specdecode.HiddenStateDrafter`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import torch

from ascend_specdecode.drafters.models import DraftInput, DraftOutput
from ascend_specdecode.errors import ArgumentError
from ascend_specdecode.hf.caches import SequenceCaches
from ascend_specdecode.hf.mtp_layer import MtpLayer, mtp_config


class MtpModel:
    """Runs the MTP layer, a cache for each sequence.

    Args:
        model: the target's model, for its embedding, head and rotary embedding.
        layer: its MTP layer, see :func:`load_mtp_layer`.
    """

    def __init__(self, model: Any, layer: MtpLayer) -> None:
        self._model = model
        self._layer = layer.eval()
        self._caches = SequenceCaches(mtp_config(model.config))

    @property
    def sequences(self) -> frozenset[int]:
        """Sequences that a cache is held for."""
        return self._caches.sequences

    async def next_output(self, rows: Sequence[DraftInput]) -> DraftOutput:
        """Compute the rows in a worker thread; see ``HiddenStateModel``.

        Raises:
            ArgumentError: a row has no hidden states.
        """
        return await anyio.to_thread.run_sync(self._compute, rows)

    @torch.inference_mode()
    def _compute(self, rows: Sequence[DraftInput]) -> DraftOutput:
        hidden = torch.stack([self._row(row)[-1] for row in rows])
        return DraftOutput(self._model.lm_head(hidden), hidden)

    def _row(self, row: DraftInput) -> torch.Tensor:
        """Normed hidden states [N, H] of a row."""
        if row.hidden_states is None:
            raise ArgumentError("hidden_states", None, "the target's hidden states")
        base = self._model.model
        embedded = base.embed_tokens(torch.tensor(row.tokens))
        if row.start == 0:  # position 0 has no token before it
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        positions = torch.arange(row.start, row.end)
        later = torch.arange(row.end) > positions[:, None]
        mask = torch.zeros(later.shape, dtype=embedded.dtype)
        mask.masked_fill_(later, torch.finfo(mask.dtype).min)
        rotary = base.rotary_emb(embedded[None], positions[None])
        cache = self._caches.at(row.sequence_id, row.start)
        states = row.hidden_states.to(embedded.dtype)
        out: torch.Tensor = self._layer(
            embedded[None], states[None], rotary, mask[None, None], cache
        )
        return out[0]

    def free(self, sequence_id: int) -> None:
        """Drop the cache of a sequence, known or not."""
        self._caches.free(sequence_id)
