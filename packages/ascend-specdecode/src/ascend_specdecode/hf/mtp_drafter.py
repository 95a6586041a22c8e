"""Drafting with a target's own MTP layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import attrs
import torch

from ascend_specdecode.errors import ArgumentError, DrafterError
from ascend_specdecode.hf.mtp_layer import MtpLayer, mtp_config
from ascend_specdecode.protocols import DraftedSequence, Proposal, Scores
from ascend_specdecode.sequences import SequenceState


@attrs.define(eq=False)
class _Known:
    """What is held for one sequence.

    ``hidden`` are the target's states of positions ``computed`` .. ``computed + len(hidden)``;
    the layer's cache has entries for the positions before ``computed``, and ``last`` is its output
    for the position before ``computed``.
    """

    cache: Any
    hidden: torch.Tensor
    computed: int = 0
    last: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self.computed + len(self.hidden)


class MtpDrafter:
    """Drafts k tokens by running the MTP layer k times; the most likely token each time.

    The target must return hidden states (``hidden_states=True``).

    Args:
        model: the target's model, for its embedding, head and rotary embedding.
        layer: its MTP layer, see :func:`load_mtp_layer`.
    """

    def __init__(self, model: Any, layer: MtpLayer) -> None:
        self._model = model
        self._layer = layer.eval()
        self._config = mtp_config(model.config)
        self._known: dict[int, _Known] = {}

    @property
    def sequences(self) -> frozenset[int]:
        """Sequences that state is held for."""
        return frozenset(self._known)

    async def observe(
        self,
        batch: Sequence[DraftedSequence],
        scores: Scores,
        emitted: Sequence[Sequence[int]],
    ) -> None:
        """Keep the hidden states of positions that are verified now.

        Raises:
            ArgumentError: the target returns no hidden states.
        """
        if scores.hidden_states is None:
            raise ArgumentError("hidden_states", None, "the target's hidden states, per row")
        for row, hidden, tokens in zip(batch, scores.hidden_states, emitted, strict=True):
            accepted = max(len(tokens) - 1, 0)
            known = self._of(row.sequence.sequence_id)
            count = row.sequence.length + accepted - row.cached_length
            skipped = known.end - row.cached_length
            if skipped >= 0:  # a gap is found when the sequence is drafted
                known.hidden = torch.cat([known.hidden, hidden[skipped:count]])

    def _of(self, sequence_id: int) -> _Known:
        known = self._known.get(sequence_id)
        if known is None:
            from transformers import DynamicCache

            empty = torch.zeros((0, self._config.hidden_size), dtype=self._model.dtype)
            known = _Known(DynamicCache(config=self._config), empty)
            self._known[sequence_id] = known
        return known

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> Sequence[Proposal]:
        """Propose ``k`` tokens after each sequence, in a worker thread.

        Raises:
            DrafterError: hidden states of some sequences were never seen.
        """
        return await anyio.to_thread.run_sync(self._propose_all, sequences, k)

    @torch.inference_mode()
    def _propose_all(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        states = [self._of(sequence.sequence_id) for sequence in sequences]
        blind = [
            sequence.sequence_id
            for sequence, known in zip(sequences, states, strict=True)
            if known.end < sequence.length - 1 or sequence.length < 2
        ]
        if blind:
            raise DrafterError("hidden states of the target are missing", blind)
        pairs = zip(sequences, states, strict=True)
        return [Proposal(tuple(self._propose(one, known, k))) for one, known in pairs]

    def _propose(self, sequence: SequenceState, known: _Known, k: int) -> list[int]:
        self._catch_up(sequence, known)
        hidden, position = known.last, known.computed
        assert hidden is not None  # noqa: S101 - a sequence has at least 2 tokens
        follow = list(sequence.assumed)
        drafted: list[int] = []
        while len(drafted) < k:
            token = follow.pop(0) if follow else self._most_likely(hidden)
            if position - known.computed >= len(sequence.assumed):
                drafted.append(token)
            if len(drafted) < k:
                hidden = self._run(torch.tensor([token]), hidden, position, known.cache)[-1:]
            position += 1
        self._crop(known.cache, known.computed)
        return drafted

    def _catch_up(self, sequence: SequenceState, known: _Known) -> None:
        """Run the layer over the verified positions that it has not seen."""
        count = sequence.length - 1 - known.computed
        if count <= 0:
            return
        tokens = torch.tensor(sequence.since(known.computed + 1), dtype=torch.int64)
        out = self._run(tokens, known.hidden[:count], known.computed, known.cache)
        known.last, known.hidden = out[-1:], known.hidden[count:].clone()
        known.computed += count

    def _run(
        self, tokens: torch.Tensor, hidden: torch.Tensor, first: int, cache: Any
    ) -> torch.Tensor:
        """Outputs [S, H] for tokens [S] after hidden states [S, H] of positions from ``first``."""
        base = self._model.model
        embedded = base.embed_tokens(tokens)
        if first == 0:
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        positions = torch.arange(first, first + len(tokens))
        later = torch.arange(first + len(tokens)) > positions[:, None]
        mask = torch.zeros(later.shape, dtype=embedded.dtype)
        mask.masked_fill_(later, torch.finfo(mask.dtype).min)
        rotary = base.rotary_emb(embedded[None], positions[None])
        out: torch.Tensor = self._layer(
            embedded[None], hidden[None], rotary, mask[None, None], cache
        )
        return out[0]

    def _most_likely(self, hidden: torch.Tensor) -> int:
        return int(self._model.lm_head(hidden).argmax())

    def _crop(self, cache: Any, length: int) -> None:
        surplus = cache.get_seq_length() - length
        if surplus > 0:
            cache.crop(-surplus)

    def forget(self, sequence_id: int) -> None:
        """Drop what is held for a sequence, known or not."""
        self._known.pop(sequence_id, None)
