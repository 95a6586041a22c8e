"""One request from submission to its one ending."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import anyio

from ascend_specdecode.protocols import Proposal
from ascend_specdecode.requests import Ending, Event, Finished, FinishReason, Request, Tokens
from ascend_specdecode.sequences import SequenceOrigin, SequenceState


class Lifetime:
    """What an engine knows of a request. Ends exactly once; after that nothing is emitted.

    Attributes:
        request: what was asked.
        name: what events call it.
        origin: its sequence.
        order: sorts requests by who is served first.
        submitted: engine time of submission.
        last_event: engine time of the last tokens, of the submission before them.
        events: what the consumer has not taken yet.
        ending: how it ended, None while it lives.
        length: verified tokens.
        cached: leading tokens that the target holds state for.
        unkept: accepted tokens of the last step whose state was not kept, see ``drafted_paths``.
        reserved: positions of target state that the scheduler counts for it.
        generated: tokens emitted.
        proposal: drafted tokens that wait to be verified, None where nothing was drafted yet.
        asked: tokens that the drafter was asked for when it made the proposal.
        failures: drafts lost to errors and limits.
        plain: whether it goes on without drafts.
        rate: recent share of accepted drafts, for adaptive k.
    """

    __slots__ = (
        "_on_end",
        "_on_room",
        "_state",
        "_waiter",
        "asked",
        "cached",
        "ending",
        "events",
        "failures",
        "generated",
        "last_event",
        "length",
        "limit",
        "name",
        "order",
        "origin",
        "plain",
        "proposal",
        "rate",
        "request",
        "reserved",
        "submitted",
        "unkept",
    )

    def __init__(
        self,
        request: Request,
        name: str,
        origin: SequenceOrigin,
        *,
        order: tuple[float, int],
        now: float,
        limit: int,
        on_end: Callable[[Lifetime], None],
        on_room: Callable[[], None],
    ) -> None:
        self.request = request
        self.name = name
        self.origin = origin
        self.order = order
        self.submitted = self.last_event = now
        self.limit = limit
        self.events: deque[Event] = deque()
        self.ending: Ending | None = None
        self.length = len(origin.buffer)
        self._state: SequenceState | None = None
        self.cached = self.reserved = self.generated = self.failures = self.asked = 0
        self.unkept = 0
        self.proposal: Proposal | None = None
        self.plain = False
        self.rate = 1.0
        self._waiter: anyio.Event | None = None
        self._on_end = on_end
        self._on_room = on_room

    @property
    def id(self) -> int:
        """The sequence id."""
        return self.origin.sequence_id

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_new_tokens - self.generated

    @property
    def paused(self) -> bool:
        """Whether its consumer must take events before it may go on."""
        return len(self.events) >= self.limit

    def state(self) -> SequenceState:
        """Return its sequence now."""
        if self._state is None:
            self._state = SequenceState(self.origin, self.length)
        return self._state

    def emit(self, tokens: Sequence[int], drafted: int) -> int:
        """Add verified tokens, as many as the request still wants; finish it where they end it.

        Returns:
            How many were added.
        """
        wanted = tuple(tokens[: self.request.max_new_tokens - self.generated])
        stop = self.request.stop_tokens
        if stop and not stop.isdisjoint(wanted):
            first = next(index for index, token in enumerate(wanted) if token in stop)
            wanted = wanted[: first + 1]
        count = len(wanted)
        self.origin.buffer.append(wanted)
        self.length += count
        self.generated += count
        self._state = None
        self._publish(Tokens(self.name, wanted, drafted, len(tokens) - 1))
        if wanted[-1] in stop:
            self.end(Finished(self.name, FinishReason.STOP))
        elif self.generated == self.request.max_new_tokens:
            self.end(Finished(self.name, FinishReason.LENGTH))
        return count

    def end(self, ending: Ending) -> bool:
        """End the request; return False where it had ended already. Never waits."""
        if self.ending is not None:
            return False
        self.ending = ending
        self._publish(ending)
        self._on_end(self)
        return True

    async def next_event(self) -> Event:
        """Take the oldest event; wait for one where there is none."""
        while not self.events:
            self._waiter = anyio.Event()
            await self._waiter.wait()
        was_paused = self.paused
        event = self.events.popleft()
        if was_paused and self.ending is None:
            self._on_room()
        return event

    def _publish(self, event: Event) -> None:
        self.events.append(event)
        if self._waiter is not None:
            self._waiter.set()
            self._waiter = None
