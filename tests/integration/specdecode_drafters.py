"""Drafters of the matrix: every kind, and draft models that have rehearsed what the target says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ascend_specdecode import (
    NOTHING,
    BlockDrafter,
    DraftedSequence,
    Drafter,
    DraftInput,
    DraftOutput,
    FirstDrafter,
    HiddenStateDrafter,
    ModelDrafter,
    ObservingDrafter,
    PromptLookupDrafter,
    Proposal,
    RaceDrafter,
    SequenceState,
    SuffixDrafter,
    TreeDrafter,
    TreeOfDrafts,
)

RIGHT = 0.9  # share of the places at which a rehearsed model says what the target says


class Rehearsed:
    """A draft model that knows the target's own texts, and is wrong here and there.

    It drafts at no cost, so that a run takes the time of its target; what it is wrong about is
    a function of text and position.

    Args:
        texts: prompt and continuation of every text.
        prompt_lengths: tokens of each prompt; these name the text.
        vocabulary: tokens V of the target.
        shift: how many positions its input is ahead: 1 for models that read hidden states.
    """

    block_size = 8

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        vocabulary: int,
        shift: int = 0,
    ) -> None:
        self._texts = [list(text) for text in texts]
        self._lengths = prompt_lengths
        self._vocabulary = vocabulary
        self._shift = shift
        self._held: dict[int, list[int]] = {}

    async def next_logits(self, rows: Sequence[DraftInput]) -> torch.Tensor:
        """As a causal model."""
        return self._logits(rows, 1)[:, 0]

    async def next_output(self, rows: Sequence[DraftInput]) -> DraftOutput:
        """As an MTP or EAGLE layer."""
        hidden = [row.hidden_states for row in rows]
        assert all(given is not None for given in hidden)
        last = torch.stack([given[-1] for given in hidden if given is not None])
        return DraftOutput(self._logits(rows, 1)[:, 0], last)

    async def block_logits(self, rows: Sequence[DraftInput], k: int) -> torch.Tensor:
        """As a model that drafts a block."""
        return self._logits(rows, k)

    def free(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self._held.pop(sequence_id, None)

    def _logits(self, rows: Sequence[DraftInput], k: int) -> torch.Tensor:
        logits = torch.zeros(len(rows), k, self._vocabulary)
        for index, row in enumerate(rows):
            held = self._held.setdefault(row.sequence_id, [])
            assert row.start <= len(held), "positions were left out"
            held[row.start :] = row.tokens.tolist()
            number = self._text_of(held)
            for place in range(k):
                position = len(held) + self._shift + place
                logits[index, place, self._said(number, position)] = 1.0
        return logits

    def _text_of(self, held: Sequence[int]) -> int:
        for number, (text, length) in enumerate(zip(self._texts, self._lengths, strict=True)):
            known = text[self._shift : length]
            seen = min(len(known), len(held))
            if list(held[:seen]) == known[:seen]:
                return number
        raise AssertionError("a sequence that was not rehearsed")

    def _said(self, number: int, position: int) -> int:
        text = self._texts[number]
        if position >= len(text):
            return 0
        wrong = (number * 7_919 + position * 104_729) % 1000 >= 1000 * RIGHT
        return (text[position] + wrong) % self._vocabulary


Make = Callable[[], Drafter]


def drafters(
    texts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    vocabulary: int,
    others: Mapping[str, Make] | None = None,
) -> dict[str, Make]:
    """A maker for every kind of drafter that drafts chains; ``others`` replace or add some."""

    def rehearsed(shift: int) -> Rehearsed:
        return Rehearsed(texts, prompt_lengths, vocabulary, shift)

    makers: dict[str, Make] = {
        "n-gram": PromptLookupDrafter,
        "suffix": SuffixDrafter,
        "model": lambda: ModelDrafter(rehearsed(0)),
        "hidden states": lambda: HiddenStateDrafter(rehearsed(1)),
        "block": lambda: BlockDrafter(rehearsed(1)),
        "first": lambda: FirstDrafter(PromptLookupDrafter(3, 3), HiddenStateDrafter(rehearsed(1))),
        "race": lambda: RaceDrafter(SuffixDrafter(), ModelDrafter(rehearsed(0))),
    }
    return makers | dict(others or {})


def tree_drafters(
    texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int], vocabulary: int
) -> dict[str, Make]:
    """Makers of drafters of trees."""

    def model() -> Rehearsed:
        return Rehearsed(texts, prompt_lengths, vocabulary)

    return {
        "branches": lambda: ModelDrafter(model(), branches=2),
        "tree of drafts": lambda: TreeOfDrafts(SuffixDrafter(), ModelDrafter(model())),
    }


class Router:
    """Gives every sequence a drafter and a largest k of its own, so that one batch mixes them.

    Args:
        assigned: for each request (by its seed) the drafter and k.
    """

    def __init__(self, assigned: Mapping[int, tuple[Drafter, int]]) -> None:
        self._assigned = assigned

    @property
    def drafts_trees(self) -> bool:
        """Whether one of them does."""
        return any(
            isinstance(one, TreeDrafter) and one.drafts_trees for one, _ in self._assigned.values()
        )

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        """Ask each drafter for its own sequences, each for its own k at most."""
        found: dict[int, Proposal] = {}
        for drafter, own, part in self._parts(sequences):
            # Drafting ahead takes one more: the guess of the bonus token.
            ahead = bool(part[0].assumed)
            proposals = [NOTHING] * len(part)
            if own:
                proposals = list(await drafter.propose(part, min(k, own + ahead)))
            pairs = zip(part, proposals, strict=True)
            found |= {sequence.sequence_id: proposal for sequence, proposal in pairs}
        return [found[sequence.sequence_id] for sequence in sequences]

    async def observe(
        self, batch: Sequence[DraftedSequence], scores: Any, emitted: Sequence[Sequence[int]]
    ) -> None:
        """Show each drafter its own rows."""
        for drafter in {id(one): one for one, _ in self._assigned.values()}.values():
            rows = [i for i, row in enumerate(batch) if self._of(row.sequence)[0] is drafter]
            if rows and isinstance(drafter, ObservingDrafter):
                hidden = [scores.hidden_states[row] for row in rows]
                shown = type(scores)(scores.logits[rows], hidden)
                await drafter.observe(
                    [batch[row] for row in rows], shown, [emitted[row] for row in rows]
                )

    def forget(self, sequence_id: int) -> None:
        """Forget it everywhere."""
        for drafter, _ in self._assigned.values():
            drafter.forget(sequence_id)

    def _of(self, sequence: SequenceState) -> tuple[Drafter, int]:
        return self._assigned[sequence.seed]

    def _parts(
        self, sequences: Sequence[SequenceState]
    ) -> list[tuple[Drafter, int, list[SequenceState]]]:
        parts: dict[tuple[int, int, bool], tuple[Drafter, int, list[SequenceState]]] = {}
        for sequence in sequences:
            drafter, own = self._of(sequence)
            key = (id(drafter), own, bool(sequence.assumed))
            parts.setdefault(key, (drafter, own, []))[2].append(sequence)
        return list(parts.values())
