"""A target, a drafter and a verifier of plain Python, whose right output is known.

A prompt begins with the number of its stream; the next token follows from the stream, the position
and the token before. So a lost, doubled or misplaced token changes all that follows it. The models
watch how they are called: what breaks a protocol is kept in ``violations``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Protocol, TypeAlias

import anyio
import attrs

from ascend_specdecode.drafted_paths import kept, node_depths
from ascend_specdecode.protocols import DraftedSequence, Proposal
from ascend_specdecode.sequences import SequenceState

VOCABULARY: Final = 997
_BITS: Final = 2**64 - 1
_COMPARED: Final = 8  # tokens before the cached length that a call compares with what is held

SimulatedScores: TypeAlias = Sequence[Sequence[int]]
"""For each row the target's own choice after the sequence and each of its drafted tokens."""


def _mixed(number: int) -> int:
    """Return 64 bits that look random (the finaliser of SplitMix64, Steele et al. 2014)."""
    mixed = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
    return mixed ^ (mixed >> 31)


def next_token(stream: int, position: int, previous: int) -> int:
    """Return the token at ``position`` of a stream, given the one before it."""
    return _mixed(stream * 1_000_003 + position * 7_919 + previous * 104_729) % VOCABULARY


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Return what a target must generate after a prompt, computed without any engine."""
    stream, previous = prompt[0], prompt[-1]
    tokens = []
    for position in range(len(prompt), len(prompt) + count):
        previous = next_token(stream, position, previous)
        tokens.append(previous)
    return tokens


class Chance(Protocol):
    """How likely a drafted token is right, by stream and position."""

    def __call__(self, stream: int, position: int) -> float:
        """Return a chance in 0..1."""
        ...


@attrs.frozen
class SameChance:
    """The same chance everywhere."""

    chance: float

    def __call__(self, stream: int, position: int) -> float:
        """Return it."""
        return self.chance


def is_right(seed: int, stream: int, position: int, chance: float) -> bool:
    """Decide whether the draft at a position is right; the same answer whenever it is asked."""
    mixed = _mixed(_mixed(seed * 69_069 + stream) + position)
    return mixed < chance * 2**64


class FaultPoint(Protocol):
    """A place where a fault may happen."""

    async def __call__(self, sequence_ids: Sequence[int]) -> None:
        """Wait, raise, or do nothing."""
        ...


class SpinError(BaseException):
    """A caller calls without end; not an error that an engine may handle."""


@attrs.define(eq=False)
class Watched:
    """What a model notices about its callers.

    Attributes:
        name: of the model.
        violations: where it is written down.
        most_calls: after so many the caller is taken to spin; None for no limit.
        busy: calls that are running.
        calls: calls so far.
    """

    name: str
    violations: list[str]
    most_calls: int | None = None
    busy: int = 0
    calls: int = 0

    def enter(self) -> None:
        """A call begins."""
        if self.busy:
            self.violations.append(f"{self.name}: called while a call was running")
        self.calls += 1
        if self.most_calls is not None and self.calls > self.most_calls:
            self.violations.append(f"{self.name}: called more than {self.most_calls} times")
            raise SpinError(self.name)
        self.busy += 1

    def leave(self) -> None:
        """A call ends."""
        self.busy -= 1

    def idle(self, what: str) -> None:
        """Something happens that no call may overlap."""
        if self.busy:
            self.violations.append(f"{self.name}: {what} while a call was running")


class SimulatedTarget:
    """The target of the streams.

    Args:
        seconds: what a call of these rows costs, in virtual seconds.
        before: awaited in every call before it computes; may wait or raise.
        after: awaited after the state has grown, as a call may fail halfway.

    Attributes:
        held: tokens it holds state for, by sequence.
        streams: stream of every sequence it ever saw.
        violations: how its callers broke the protocol.
    """

    scores_trees: ClassVar[bool] = True
    vocabulary_size: ClassVar[int] = VOCABULARY

    def __init__(
        self,
        seconds: Callable[[Sequence[DraftedSequence]], float] = lambda batch: 0.0,
        before: FaultPoint | None = None,
        after: FaultPoint | None = None,
    ) -> None:
        self.held: dict[int, list[int]] = {}
        self.streams: dict[int, int] = {}
        self.violations: list[str] = []
        self.watched = Watched("target", self.violations)
        self._seconds = seconds
        self._before, self._after = before, after

    async def score(self, batch: Sequence[DraftedSequence]) -> SimulatedScores:
        """Compute the rows; see :class:`ascend_specdecode.Target`."""
        self.watched.enter()
        try:
            for row in batch:
                self.streams.setdefault(row.sequence.sequence_id, int(row.sequence.since(0)[0]))
            if self._before is not None:
                await self._before([row.sequence.sequence_id for row in batch])
            await anyio.sleep(self._seconds(batch))
            scores = [self._row(row) for row in batch]
            if self._after is not None:
                await self._after([row.sequence.sequence_id for row in batch])
            return scores
        finally:
            self.watched.leave()

    def roll_back(self, sequence_id: int, length: int) -> None:
        """Keep the first ``length`` tokens."""
        self.watched.idle("roll_back")
        held = self.held.get(sequence_id, [])
        if length > len(held):
            self.violations.append(f"target: rolled back to {length} of {len(held)} tokens")
        del held[length:]

    def free(self, sequence_id: int) -> None:
        """Drop a sequence."""
        self.watched.idle("free")
        self.held.pop(sequence_id, None)

    def _row(self, row: DraftedSequence) -> list[int]:
        sequence, drafted = row.sequence, row.proposal.tokens
        held = self.held.setdefault(sequence.sequence_id, [])
        self._compare(held, row)
        del held[row.cached_length :]
        held += sequence.since(row.cached_length).tolist()
        held += drafted
        if not row.needs_scores:
            return []
        stream, position = self.streams[sequence.sequence_id], sequence.length
        parents = row.proposal.parents
        depths = node_depths(parents if parents is not None else range(-1, len(drafted) - 1))
        previous = zip([-1, *depths], [int(sequence.verified[-1]), *drafted], strict=True)
        return [next_token(stream, position + depth + 1, token) for depth, token in previous]

    def _compare(self, held: list[int], row: DraftedSequence) -> None:
        cached = row.cached_length
        if len(held) != cached:
            self.violations.append(f"target: holds {len(held)} tokens, was told {cached}")
        start = max(0, cached - _COMPARED)
        if held[start:cached] != row.sequence.origin.buffer.view(start, cached).tolist():
            self.violations.append(f"target: holds other tokens than the sequence before {cached}")


class SimulatedDrafter:
    """Drafts the target's own tokens, right with a given chance.

    Args:
        chance: how likely each position is right.
        seconds: what drafting ``k`` tokens for so many sequences costs, in virtual seconds.
        seed: of the choice which positions are right.
        branches: tokens after each place of a draft; above 1 drafts are trees, of which the first
            path is right with ``chance``, and another with the rest of it.
        before: awaited in every ``propose``; may wait or raise.
        observing: awaited at the end of every ``observe``; may wait or raise.

    Attributes:
        known: sequences it was asked about and was not told to forget.
        seen: verified tokens whose scores it was shown, by sequence.
        violations: how its callers broke the protocol.
    """

    def __init__(
        self,
        chance: Chance | float = 1.0,
        seconds: Callable[[int, int], float] = lambda k, rows: 0.0,
        *,
        seed: int = 0,
        branches: int = 1,
        before: FaultPoint | None = None,
        observing: FaultPoint | None = None,
    ) -> None:
        self.drafts_trees = branches > 1
        self.known: set[int] = set()
        self.seen: dict[int, int] = {}
        self.violations: list[str] = []
        self.watched = Watched("drafter", self.violations)
        self._chance = SameChance(chance) if isinstance(chance, float | int) else chance
        self._seconds = seconds
        self._seed = seed
        self._branches = branches
        self._before, self._observing = before, observing

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> Sequence[Proposal]:
        """Draft; see :class:`ascend_specdecode.Drafter`."""
        self.watched.enter()
        try:
            self.known.update(one.sequence_id for one in sequences)
            if self._before is not None:
                await self._before([one.sequence_id for one in sequences])
            await anyio.sleep(self._seconds(k, len(sequences)))
            return [self._draft(one, k) for one in sequences]
        finally:
            self.watched.leave()

    async def observe(
        self,
        batch: Sequence[DraftedSequence],
        scores: SimulatedScores,
        emitted: Sequence[Sequence[int]],
    ) -> None:
        """Check that every position is shown once, in order."""
        self.watched.enter()
        try:
            for row, tokens in zip(batch, emitted, strict=True):
                number, length = row.sequence.sequence_id, row.sequence.length
                if self.seen.get(number, 0) != row.cached_length:
                    shown = f"from {row.cached_length}, had seen {self.seen.get(number, 0)}"
                    self.violations.append(f"drafter: was shown positions {shown}")
                self.seen[number] = length + (kept(row.proposal, tokens) if tokens else 0)
            if self._observing is not None:
                await self._observing([row.sequence.sequence_id for row in batch])
        finally:
            self.watched.leave()

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence."""
        self.watched.idle("forget")
        self.known.discard(sequence_id)
        self.seen.pop(sequence_id, None)

    def _draft(self, sequence: SequenceState, k: int) -> Proposal:
        verified = sequence.verified
        previous = sequence.assumed[-1] if sequence.assumed else int(verified[-1])
        if self._branches == 1:
            return Proposal(self._chain(int(verified[0]), len(sequence), previous, k))
        return self._tree(int(verified[0]), len(sequence), previous, k)

    def _chain(self, stream: int, start: int, previous: int, k: int) -> tuple[int, ...]:
        drafted = []
        for position in range(start, start + k):
            previous = self._guess(stream, position, previous, 0)
            drafted.append(previous)
        return tuple(drafted)

    def _tree(self, stream: int, start: int, previous: int, k: int) -> Proposal:
        """Draft a first path of half the tokens, then further children, the first levels first."""
        tokens = list(self._chain(stream, start, previous, -(-k // 2)))
        parents = list(range(-1, len(tokens) - 1))
        first_leaf = len(tokens) - 1
        parent = -1
        while len(tokens) < k:
            depth = 0 if parent < 0 else node_depths(parents)[parent] + 1
            above = previous if parent < 0 else tokens[parent]
            for rank in range(int(parent < first_leaf), self._branches):
                tokens.append(self._guess(stream, start + depth, above, rank))
                parents.append(parent)
            parent += 1
        return Proposal(tuple(tokens), parents=tuple(parents)).first(k)

    def _guess(self, stream: int, position: int, previous: int, rank: int) -> int:
        """Draft one token; where the first guess is wrong, the second is right."""
        right = is_right(self._seed, stream, position, self._chance(stream, position))
        return (next_token(stream, position, previous) + rank - (not right)) % VOCABULARY


class SimulatedVerifier:
    """Accepts drafted tokens, chains or trees, for as long as they are the target's own choice.

    Args:
        before: awaited in every call; may wait or raise.
    """

    verifies_trees: ClassVar[bool] = True

    def __init__(self, before: FaultPoint | None = None) -> None:
        self._before = before

    async def verify(
        self, batch: Sequence[DraftedSequence], scores: SimulatedScores
    ) -> Sequence[Sequence[int]]:
        """Verify greedily; see :class:`ascend_specdecode.Verifier`."""
        if self._before is not None:
            await self._before([row.sequence.sequence_id for row in batch])
        return [accepted(row, own) for row, own in zip(batch, scores, strict=True)]


def accepted(row: DraftedSequence, own: Sequence[int]) -> Sequence[int]:
    """Return the accepted prefix of a row and the target's own next token."""
    if not row.needs_scores:
        return ()
    drafted, parents = row.proposal.tokens, row.proposal.parents
    path = [own[0]]
    current = -1
    for node, token in enumerate(drafted):
        above = node - 1 if parents is None else parents[node]
        if above == current and token == path[-1]:
            current = node
            path.append(own[node + 1])
    return path
