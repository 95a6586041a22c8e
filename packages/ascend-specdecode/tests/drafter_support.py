"""Draft models whose output depends on everything that they should have seen, and a sequence."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import anyio
import attrs
import torch

from ascend_specdecode import (
    GREEDY,
    DraftedSequence,
    DraftInput,
    DraftOutput,
    Proposal,
    SamplingParameters,
    Scores,
    SequenceState,
)

VOCABULARY = 11
HIDDEN = 3
PRIME = 1009


def run(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Run an async function on asyncio."""
    return anyio.run(function, *arguments)


def digest(values: Iterable[float]) -> int:
    """A number that depends on all values and their order."""
    found = 7
    for value in values:
        found = (found * 31 + int(value) + 1) % PRIME
    return found


def logits_after(state: int, size: int = VOCABULARY) -> torch.Tensor:
    """Logits [size] as a function of a number."""
    generator = torch.Generator().manual_seed(state)
    return 3 * torch.randn(size, generator=generator)


def target_hidden(tokens: Sequence[int], position: int) -> torch.Tensor:
    """The target's hidden state [HIDDEN] at a position: a function of the tokens up to it."""
    seen = digest(tokens[: position + 1])
    return torch.tensor([float(seen), float(position), float(tokens[position])])


@attrs.define(eq=False)
class Calls:
    """What a fake model was asked, and a way to interrupt it."""

    inputs: list[list[DraftInput]] = attrs.field(factory=list)
    freed: list[int] = attrs.field(factory=list)
    interrupt: bool = False

    async def note(self, rows: Sequence[DraftInput]) -> None:
        self.inputs.append(list(rows))
        for row in rows:
            assert len(row.tokens) >= 1
            assert (row.tokens >= 0).all(), "a placeholder reached the model"
        await anyio.lowlevel.checkpoint()

    def finish(self) -> None:
        """Raise as a cancelled call does: after the model has written its state."""
        if self.interrupt:
            self.interrupt = False
            raise InterruptedError

    def free(self, sequence_id: int) -> None:
        self.freed.append(sequence_id)


@attrs.define(eq=False)
class FakeModel(Calls):
    """A causal model: its logits depend on all tokens that its state holds."""

    size: int = VOCABULARY
    state: dict[int, list[int]] = attrs.field(factory=dict)

    async def next_logits(self, rows: Sequence[DraftInput]) -> torch.Tensor:
        await self.note(rows)
        for row in rows:
            held = self.state.setdefault(row.sequence_id, [])
            assert row.start <= len(held), "positions were left out"
            held[row.start :] = row.tokens.tolist()
        found = [digest(self.state[row.sequence_id]) for row in rows]
        self.finish()
        return torch.stack([logits_after(one, self.size) for one in found])

    def alone(self, context: list[int]) -> torch.Tensor:
        """The logits after a context, without state."""
        return logits_after(digest(context), self.size)


@attrs.define(eq=False)
class FakeLayer(Calls):
    """A layer on hidden states: its output depends on all (hidden state, token) that it holds."""

    state: dict[int, list[int]] = attrs.field(factory=dict)

    async def next_output(self, rows: Sequence[DraftInput]) -> DraftOutput:
        await self.note(rows)
        for row in rows:
            held = self.state.setdefault(row.sequence_id, [])
            assert row.start <= len(held), "positions were left out"
            assert row.hidden_states is not None
            assert len(row.hidden_states) == len(row.tokens)
            pairs = zip(row.hidden_states, row.tokens.tolist(), strict=True)
            held[row.start :] = [pair_number(*pair) for pair in pairs]
        found = [digest(self.state[row.sequence_id]) for row in rows]
        self.finish()
        hidden = torch.stack([own_hidden(one) for one in found])
        return DraftOutput(torch.stack([logits_after(one) for one in found]), hidden)


def pair_number(hidden: torch.Tensor, token: int) -> int:
    return digest([*hidden.tolist(), token])


def own_hidden(number: int) -> torch.Tensor:
    return torch.tensor([float(number), -1.0, 0.0])


def layer_alone(tokens: list[int], verified: int, forced: list[int], k: int) -> list[int]:
    """The most likely drafts of :class:`FakeLayer`, from scratch, after ``forced`` tokens."""
    pairs = [pair_number(target_hidden(tokens, p), tokens[p + 1]) for p in range(verified - 1)]
    follow = list(forced)
    for place in range(len(forced) + k):
        if place >= len(forced):
            follow.append(int(logits_after(digest(pairs)).argmax()))
        pairs.append(pair_number(own_hidden(digest(pairs)), follow[place]))
    return follow[len(forced) :]


@attrs.define(eq=False)
class FakeBlock(Calls):
    """A block model; reads hidden states where it is given them."""

    block_size: int = 4
    state: dict[int, list[int]] = attrs.field(factory=dict)

    async def block_logits(self, rows: Sequence[DraftInput], k: int) -> torch.Tensor:
        await self.note(rows)
        for row in rows:
            held = self.state.setdefault(row.sequence_id, [])
            assert row.start <= len(held), "positions were left out"
            if row.hidden_states is None:
                held[row.start :] = row.tokens.tolist()
            else:
                pairs = zip(row.hidden_states, row.tokens.tolist(), strict=True)
                held[row.start :] = [pair_number(*pair) for pair in pairs]
        found = [digest(self.state[row.sequence_id]) for row in rows]
        self.finish()
        logits = [logits_after(one + 5 * place) for one in found for place in range(k)]
        return torch.stack(logits).reshape(len(rows), k, -1) if k else torch.zeros(len(rows), 0, 1)


@attrs.define(eq=False)
class Writer:
    """A sequence that grows as a target would make it grow, and what drafters observe of it."""

    state: SequenceState
    cached: int = 0

    @classmethod
    def start(
        cls, tokens: Sequence[int], sequence_id: int = 0, sampling: SamplingParameters = GREEDY
    ) -> Writer:
        return cls(SequenceState.of(tokens, sequence_id, sampling, seed=sequence_id + 100))

    @property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.state.verified]

    def step(
        self, proposal: Proposal, emitted: Sequence[int]
    ) -> tuple[DraftedSequence, torch.Tensor]:
        """Verify a proposal; return the row and the target's hidden states of it."""
        row = DraftedSequence(self.state, proposal, self.cached)
        computed = [*self.tokens, *proposal.tokens]
        hidden = self._hidden(computed, self.cached)
        self.state.origin.buffer.append(list(emitted))
        self.state = SequenceState(self.state.origin, self.state.length + len(emitted))
        self.cached = self.state.length - 1
        return row, hidden

    def prompt_part(self, end: int) -> tuple[DraftedSequence, torch.Tensor]:
        """Score the prompt up to ``end`` without emitting."""
        row = DraftedSequence(self.state.at(end), cached_length=self.cached, needs_scores=False)
        hidden = self._hidden(self.tokens[:end], self.cached)
        self.cached = end
        return row, hidden

    def _hidden(self, tokens: list[int], start: int) -> torch.Tensor:
        rows = [target_hidden(tokens, position) for position in range(start, len(tokens))]
        return torch.stack(rows) if rows else torch.zeros(0, HIDDEN)


async def show(
    drafter: Any, row: DraftedSequence, hidden: torch.Tensor, emitted: Sequence[int]
) -> None:
    """Let a drafter observe one row."""
    await drafter.observe([row], Scores(torch.zeros(1, 1, 1), [hidden]), [emitted])
    hidden.fill_(-77)  # the target writes over its tensor: the drafter must hold a copy
