"""Several drafters as one: the first that proposes, all at the same time, or all as one tree."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import anyio

from ascend_specdecode.drafted_paths import all_paths
from ascend_specdecode.errors import ArgumentError, DrafterError
from ascend_specdecode.protocols import (
    NOTHING,
    DraftedSequence,
    Drafter,
    ObservingDrafter,
    Proposal,
    TreeDrafter,
)
from ascend_specdecode.sequences import SequenceState
from ascend_specdecode.trees import ROOT

_log = logging.getLogger("ascend_specdecode")


class _Composite:
    """What both have in common.

    Args:
        drafters: at least one; those that come first are preferred.

    Raises:
        ArgumentError: there is no drafter.
    """

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            raise ArgumentError("drafters", "none", "at least one drafter")
        self._drafters = drafters
        self._failures = [0] * len(drafters)

    @property
    def drafts_trees(self) -> bool:
        """Whether one of them does."""
        return any(isinstance(one, TreeDrafter) and one.drafts_trees for one in self._drafters)

    @property
    def failures(self) -> tuple[int, ...]:
        """How often each drafter failed; the others stood in for it."""
        return tuple(self._failures)

    async def observe(
        self,
        batch: Sequence[DraftedSequence],
        scores: Any,
        emitted: Sequence[Sequence[int]],
    ) -> None:
        """Let those that learn from scored batches see this one.

        Raises:
            Exception: what the drafter raised, if none of those that observe could.
        """
        observing = [
            (index, drafter)
            for index, drafter in enumerate(self._drafters)
            if isinstance(drafter, ObservingDrafter)
        ]
        errors = []
        for index, drafter in observing:
            try:
                await drafter.observe(batch, scores, emitted)
            except Exception as error:  # noqa: BLE001 - a drafter may fail in any way; it is counted
                errors.append(error)
                self._failed(index, error)
        if errors and len(errors) == len(self._drafters):
            raise errors[0]

    def forget(self, sequence_id: int) -> None:
        """Let every drafter drop what it holds for a sequence."""
        for drafter in self._drafters:
            drafter.forget(sequence_id)

    def _failed(self, index: int, error: Exception) -> None:
        self._failures[index] += 1
        _log.warning("drafter %d of %d failed: %r", index + 1, len(self._drafters), error)

    async def _ask(
        self, index: int, sequences: Sequence[SequenceState], k: int
    ) -> tuple[Sequence[Proposal], Exception | None]:
        """Return one drafter's proposals, nothing for sequences that it fails for, and its error.

        Where it names the sequences that fail, the rest is asked for again.
        """
        failed: set[int] = set()
        first: Exception | None = None
        while True:
            asked = [one for one in sequences if one.sequence_id not in failed]
            try:
                found = await self._drafters[index].propose(asked, k) if asked else ()
                break
            except DrafterError as error:
                named = error.sequence_ids - failed
                failed |= named or {one.sequence_id for one in sequences}
                first = first or error
                self._failed(index, error)
            except Exception as error:  # noqa: BLE001 - a drafter may fail in any way; it is counted
                self._failed(index, error)
                return [NOTHING] * len(sequences), error
        by_id = {one.sequence_id: given for one, given in zip(asked, found, strict=True)}
        return [by_id.get(one.sequence_id, NOTHING) for one in sequences], first


class FirstDrafter(_Composite):
    """For each sequence the proposal of the first drafter that has one, asked one after another.

    A drafter that fails is counted and logged, and the next one is asked.

    Args:
        drafters: at least one, the preferred first; usually the cheap ones, such as
            :class:`PromptLookupDrafter`, before a model.

    Raises:
        ArgumentError: there is no drafter.
    """

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        """Propose up to ``k`` tokens after each sequence.

        Raises:
            Exception: what the last drafter raised, if all of them failed.
        """
        proposals = [NOTHING] * len(sequences)
        errors = []
        for index in range(len(self._drafters)):
            open_rows = [row for row, given in enumerate(proposals) if not given.tokens]
            if not open_rows:
                break
            found, error = await self._ask(index, [sequences[row] for row in open_rows], k)
            if error is not None:
                errors.append(error)
            for row, proposal in zip(open_rows, found, strict=True):
                proposals[row] = proposal
        if len(errors) == len(self._drafters):
            raise errors[-1]
        return proposals


class RaceDrafter(_Composite):
    """For each sequence the proposal that is ready first; all drafters draft at the same time.

    When every sequence has a proposal the drafters that are still busy are cancelled. Which one
    wins depends on time: the output stays exact, but a seed alone does not repeat it.

    Args:
        drafters: at least one.

    Raises:
        ArgumentError: there is no drafter.
    """

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        """Propose up to ``k`` tokens after each sequence.

        Raises:
            Exception: what the last drafter raised, if all of them failed.
        """
        proposals = [NOTHING] * len(sequences)
        errors: list[Exception] = []

        async def run(index: int) -> None:
            found, error = await self._ask(index, sequences, k)
            if error is not None:
                errors.append(error)
            for row, proposal in enumerate(found):
                if not proposals[row].tokens:
                    proposals[row] = proposal
            if all(proposal.tokens for proposal in proposals):
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for index in range(len(self._drafters)):
                group.start_soon(run, index)
        if len(errors) == len(self._drafters):
            raise errors[-1]
        return proposals


class TreeOfDrafts(_Composite):
    """The proposals of all drafters as one tree: where they agree they share a path.

    The k tokens are shared out position by position, so that each drafter gets its first tokens in.
    The first drafter's path comes first. Probabilities are dropped: tokens that two drafters
    propose have no distribution of one of them, so all count as point masses, which is exact; for
    sampled requests a model alone is accepted more often.

    Args:
        drafters: at least one, the preferred first.

    Raises:
        ArgumentError: there is no drafter.
    """

    @property
    def drafts_trees(self) -> bool:
        """Yes."""
        return True

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        """Propose up to ``k`` tokens after each sequence.

        Raises:
            Exception: what the last drafter raised, if all of them failed.
        """
        answers = [await self._ask(index, sequences, k) for index in range(len(self._drafters))]
        errors = [error for _, error in answers if error is not None]
        if len(errors) == len(self._drafters):
            raise errors[-1]
        found = zip(*(proposals for proposals, _ in answers), strict=True)
        return [joined(proposals, k) for proposals in found]


def joined(proposals: Sequence[Proposal], k: int) -> Proposal:
    """Return one tree of at most ``k`` tokens from proposals of the same sequence."""
    paths = [path for proposal in proposals for path in all_paths(proposal)]
    chosen: dict[tuple[int, ...], None] = {}
    for length in range(1, max(map(len, paths), default=0) + 1):
        for path in paths:
            if len(path) >= length and len(chosen) < k:
                chosen.setdefault(path[:length])
    ordered = _depth_first(chosen)
    index = {path: node for node, path in enumerate(ordered)}
    parents = tuple(index.get(path[:-1], ROOT) for path in ordered)
    return Proposal(tuple(path[-1] for path in ordered), parents=parents) if ordered else NOTHING


def _depth_first(chosen: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Order paths so that each is followed by its continuations, in the order given."""
    below: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for path in chosen:
        below.setdefault(path[:-1], []).append(path)
    ordered: list[tuple[int, ...]] = []
    waiting = below.get((), [])[::-1]
    while waiting:
        ordered.append(waiting.pop())
        waiting += below.get(ordered[-1], [])[::-1]
    return ordered
