from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import pytest
import torch
from drafter_support import FakeLayer, Writer, show

from ascend_specdecode import (
    ArgumentError,
    DrafterError,
    FirstDrafter,
    HiddenStateDrafter,
    ObservingDrafter,
    PromptLookupDrafter,
    Proposal,
    RaceDrafter,
    Scores,
    SequenceState,
    SuffixDrafter,
)

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
COMPOSITES = pytest.mark.parametrize("make", [FirstDrafter, RaceDrafter])


@attrs.define(eq=False)
class Scripted:
    """Proposes a fixed token for some sequences, after a while or after another one's calls."""

    token: int
    serves: frozenset[int] = frozenset({1, 2, 3})
    seconds: float = 0.0
    error: Exception | None = None
    after: Any = None
    calls_before: int = 1
    returned: int = 0
    asked: list[list[int]] = attrs.field(factory=list)
    forgotten: list[int] = attrs.field(factory=list)
    cancelled: int = 0

    async def propose(self, sequences: Sequence[SequenceState], k: int) -> list[Proposal]:
        self.asked.append([one.sequence_id for one in sequences])
        try:
            await anyio.sleep(self.seconds)
            while self.after is not None and self.after.returned < self.calls_before:
                await anyio.sleep(0)
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        self.returned += 1
        if self.error is not None and self._concerns(sequences):
            raise self.error
        return [
            Proposal((self.token,) * k if one.sequence_id in self.serves else ())
            for one in sequences
        ]

    def _concerns(self, sequences: Sequence[SequenceState]) -> bool:
        named = getattr(self.error, "sequence_ids", None)
        return named is None or any(one.sequence_id in named for one in sequences)

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)


STATES = [SequenceState.of([5, 6], number) for number in (1, 2, 3)]


def first_tokens(drafter: Any, backend: str = "asyncio", k: int = 2) -> list[int | None]:
    found = anyio.run(drafter.propose, STATES, k, backend=backend)
    assert all(len(proposal.tokens) in (0, k) for proposal in found)
    return [proposal.tokens[0] if proposal.tokens else None for proposal in found]


@BACKENDS
def test_the_first_that_proposes_serves_a_sequence(backend: str) -> None:
    drafters = Scripted(1, frozenset({2})), Scripted(2, frozenset({1, 2})), Scripted(3)
    assert first_tokens(FirstDrafter(*drafters), backend) == [2, 1, 3]
    assert [drafter.asked for drafter in drafters] == [[[1, 2, 3]], [[1, 3]], [[3]]]


@BACKENDS
def test_later_drafters_are_not_asked_in_vain(backend: str) -> None:
    drafters = Scripted(1), Scripted(2)
    assert first_tokens(FirstDrafter(*drafters), backend) == [1, 1, 1]
    assert drafters[1].asked == []


@BACKENDS
def test_the_fastest_wins_the_race_and_the_others_are_cancelled(backend: str) -> None:
    drafters = Scripted(1, seconds=60), Scripted(2), Scripted(3, seconds=60)
    assert first_tokens(RaceDrafter(*drafters), backend) == [2, 2, 2]
    assert [drafter.cancelled for drafter in drafters] == [1, 0, 1]


@BACKENDS
def test_a_race_waits_for_sequences_that_the_fastest_does_not_serve(backend: str) -> None:
    for served, expected in (({1, 2, 3}, [1, 2, 2]), ({3}, [1, None, 2])):
        fast = Scripted(1, frozenset({1}))
        slow = Scripted(2, frozenset(served), after=fast)
        assert first_tokens(RaceDrafter(slow, fast), backend) == expected


@BACKENDS
@COMPOSITES
def test_a_drafter_that_fails_is_counted_and_another_stands_in(
    make: Any, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Scripted(1, error=ValueError("broken"))
    drafter = make(broken, Scripted(2, after=broken))
    with caplog.at_level(logging.WARNING):
        assert first_tokens(drafter, backend) == [2, 2, 2]
    assert drafter.failures == (1, 0)
    assert "drafter 1 of 2 failed: ValueError('broken')" in caplog.text


@BACKENDS
@COMPOSITES
def test_a_drafter_that_names_sequences_serves_the_others(make: Any, backend: str) -> None:
    named = Scripted(1, error=DrafterError("cannot", [2]))
    drafter = make(named, Scripted(2, after=named, calls_before=2))
    assert first_tokens(drafter, backend) == [1, 2, 1]
    assert named.asked == [[1, 2, 3], [1, 3]]
    assert drafter.failures == (1, 0)


@BACKENDS
@COMPOSITES
def test_an_error_that_names_nobody_present_does_not_repeat_for_ever(
    make: Any, backend: str
) -> None:
    @attrs.define(eq=False)
    class Confused(Scripted):
        def _concerns(self, sequences: Sequence[SequenceState]) -> bool:
            return True

    confused = Confused(1, error=DrafterError("cannot", [99]))
    assert first_tokens(make(confused, Scripted(2)), backend) == [2, 2, 2]
    assert len(confused.asked) <= 2


@COMPOSITES
def test_when_all_fail_the_failure_is_raised(make: Any) -> None:
    broken = [Scripted(1, error=ValueError("one")), Scripted(2, error=KeyError("two"))]
    with pytest.raises((ValueError, KeyError)):
        first_tokens(make(*broken))
    with pytest.raises(DrafterError) as caught:
        first_tokens(make(Scripted(1, error=DrafterError("cannot", [1, 3]))))
    assert caught.value.sequence_ids == {1, 3}


@BACKENDS
def test_a_race_can_be_cancelled(backend: str) -> None:
    drafters = Scripted(1, seconds=60), Scripted(2, seconds=60)

    async def main() -> bool:
        with anyio.move_on_after(0.05) as scope:
            await RaceDrafter(*drafters).propose(STATES, 1)
        return scope.cancelled_caught

    assert anyio.run(main, backend=backend)
    assert [drafter.cancelled for drafter in drafters] == [1, 1]


@COMPOSITES
def test_forgetting_and_observing_reach_every_drafter(make: Any) -> None:
    plain, layer = Scripted(1, frozenset()), HiddenStateDrafter(FakeLayer())
    drafter = make(plain, layer)
    assert isinstance(drafter, ObservingDrafter)
    writer = Writer.start([1, 2, 3], 2)
    row, hidden = writer.step(Proposal(), [4])
    anyio.run(show, drafter, row, hidden, [4])
    (proposal,) = anyio.run(drafter.propose, [writer.state], 3)
    assert len(proposal.tokens) == 3
    drafter.forget(2)
    assert plain.forgotten == [2]
    assert layer.sequence_ids == frozenset()


@COMPOSITES
def test_an_observer_that_fails_is_counted(make: Any) -> None:
    row, _ = Writer.start([1, 2, 3], 2).step(Proposal(), [4])
    blind = [row], Scores(torch.zeros(1, 1, 1)), [[4]]
    drafter = make(Scripted(1), HiddenStateDrafter(FakeLayer()))
    anyio.run(drafter.observe, *blind)
    assert drafter.failures == (0, 1)
    with pytest.raises(ArgumentError, match="hidden_states"):
        anyio.run(make(HiddenStateDrafter(FakeLayer())).observe, *blind)


def test_lookup_before_suffix() -> None:
    """The usual order: short exact repeats first, any repeat else."""
    drafter = FirstDrafter(PromptLookupDrafter(3, 3), SuffixDrafter())
    long = SequenceState.of([1, 2, 3, 9, 8, 1, 2, 3], 1)
    short = SequenceState.of([1, 2, 7, 2], 2)
    found = anyio.run(drafter.propose, [long, short], 2)
    assert [proposal.tokens for proposal in found] == [(9, 8), (7, 2)]


@COMPOSITES
def test_no_drafter_is_refused(make: Any) -> None:
    with pytest.raises(ArgumentError, match="drafters: found none, allowed at least one drafter"):
        make()
