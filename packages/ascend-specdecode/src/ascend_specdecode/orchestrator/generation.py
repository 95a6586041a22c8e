"""What a caller holds of its request: the events, and the end of its interest."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from ascend_specdecode.orchestrator.lifetime import Lifetime
from ascend_specdecode.requests import Cancelled, CancelReason, Ending, Event


class Generation:
    """The events of one request: tokens, then exactly one ending.

    Iterating submits the request. A caller that stops (``break``, an exception, cancellation of its
    task) cancels the request; ``async with`` does so at once, else it happens when the object is
    dropped. An object serves one consumer.
    """

    def __init__(self, submit: Callable[[], Lifetime]) -> None:
        self._submit = submit
        self._life: Lifetime | None = None
        self._last = False

    @property
    def submitted(self) -> bool:
        """Whether the engine has taken the request."""
        return self._life is not None

    @property
    def pending(self) -> int:
        """Events that the engine has made and the consumer has not taken."""
        return len(self._life.events) if self._life is not None else 0

    @property
    def ending(self) -> Ending | None:
        """How the request ended; None while it has not."""
        return self._life.ending if self._life is not None else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Return the next event.

        Raises:
            EngineClosedError: the engine is not open.
            QueueFullError: too many requests wait and the engine is set to refuse.
            ArgumentError: the request can never fit the engine's limits.
        """
        if self._last:
            raise StopAsyncIteration
        if self._life is None:
            self._life = self._submit()
        try:
            event = await self._life.next_event()
        except BaseException:  # cancellation, on whatever loop
            self.cancel()
            raise
        self._last = isinstance(event, Ending)
        return event

    def cancel(self) -> None:
        """Cancel the request; never waits. Its state is freed before the engine's next step."""
        if self._life is not None:
            self._life.end(Cancelled(self._life.name, CancelReason.CONSUMER))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()
