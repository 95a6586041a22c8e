"""Seeded faults: what may go wrong at an await, decided by one random generator per run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import anyio.lowlevel
import attrs

from ascend_specdecode.errors import DrafterError, SpecDecodeError, TargetError
from ascend_specdecode.simulator.models import FaultPoint

LONG: Final = 1e4  # virtual seconds of a call that hangs; longer than any time limit of a scenario


class InjectedError(SpecDecodeError):
    """An error that the simulator made."""

    def __init__(self, where: str) -> None:
        super().__init__(f"injected into {where}")


@attrs.frozen
class FaultRates:
    """Chances of each fault at one await.

    Attributes:
        delay: wait for a random time, sometimes where cancellation does not reach, as in a thread.
        reorder: let other tasks run first, a random number of times.
        error: raise, for all sequences of the call or for some by name.
        hang: wait longer than any time limit.
    """

    delay: float = 0.0
    reorder: float = 0.0
    error: float = 0.0
    hang: float = 0.0


@attrs.define(eq=False)
class Faults:
    """The faults of one run.

    Attributes:
        rates: chances.
        generator: decides; the same seed makes the same decisions.
        log: what was injected, for a replay.
        blamed: sequences for which a call raised or hung, by place.
        count: faults injected.
    """

    rates: FaultRates
    generator: random.Random
    log: Callable[[str], None]
    blamed: dict[str, set[int]] = attrs.field(factory=dict)
    count: int = 0

    def point(self, where: str) -> FaultPoint:
        """Return the fault point of a place: ``target``, ``drafter`` ..."""

        async def strike(sequence_ids: Sequence[int]) -> None:
            await self.strike(where, sequence_ids)

        return strike

    async def strike(self, where: str, sequence_ids: Sequence[int]) -> None:
        """Let something happen, or nothing."""
        draw, rates = self.generator.random, self.rates
        if draw() < rates.reorder:
            for _ in range(self.generator.randint(1, 4)):
                await anyio.lowlevel.checkpoint()
        if draw() < rates.delay:
            await self._delay(where)
        if draw() < rates.error:
            self._raise(where, sequence_ids)
        if draw() < rates.hang:
            self._note(f"{where} hangs")
            self._blame(where, sequence_ids)
            await anyio.sleep(LONG)

    async def _delay(self, where: str) -> None:
        seconds = self.generator.expovariate(1.0)
        shielded = self.generator.random() < 0.3
        self._note(f"{where} takes {seconds:.3f} s more{', in a thread' if shielded else ''}")
        with anyio.CancelScope(shield=shielded):
            await anyio.sleep(seconds)

    def _note(self, text: str) -> None:
        self.count += 1
        self.log(text)

    def _raise(self, where: str, sequence_ids: Sequence[int]) -> None:
        named = [one for one in sequence_ids if self.generator.random() < 0.5]
        whole = not named or self.generator.random() < 0.5
        self._note(f"{where} raises for {list(sequence_ids) if whole else named}")
        if whole:
            self._blame(where, sequence_ids)
            raise InjectedError(where)
        if where.startswith("drafter"):
            raise DrafterError("injected", named)
        self._blame("target", named)  # a verifier that blames a sequence blames its scores
        raise TargetError("injected", named)

    def _blame(self, where: str, sequence_ids: Sequence[int]) -> None:
        self.blamed.setdefault(where, set()).update(sequence_ids)
