"""A drafter of ascend-specdecode in a thread of its own, one call at a time.

Drafters are coroutines; vLLM's worker is not. The thread runs an event loop for them, so that a
call goes on while the worker's thread computes the target.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import attrs

from ascend_specdecode import Drafter, Proposal, SequenceState


@attrs.define(eq=False)
class DraftJob:
    """A call of a drafter.

    Attributes:
        sequences: what it drafts for.
        k: tokens that are asked for.
        done: set when the call has ended; the fields below are valid from then on.
        proposals: what it proposed, one for each sequence; empty when it failed.
        error: what it raised.
        seconds: what it took.
    """

    sequences: tuple[SequenceState, ...]
    k: int
    done: threading.Event = attrs.field(factory=threading.Event)
    proposals: Sequence[Proposal] = ()
    error: Exception | None = None
    seconds: float = 0.0


class BackgroundDrafter:
    """Calls a drafter in the background; the thread starts with the first call.

    Args:
        drafter: whose calls are made.
        clock: seconds, for `DraftJob.seconds`.
    """

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        self._drafter = drafter
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        # A drafter's `forget` must not run while its `propose` does.
        self._turn = asyncio.Lock()

    def start(self, sequences: Sequence[SequenceState], k: int) -> DraftJob:
        """Begin a call; returns at once."""
        job = DraftJob(tuple(sequences), k)
        asyncio.run_coroutine_threadsafe(self._run(job), self._running_loop())
        return job

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """Drop what the drafter holds for sequences, after the calls begun so far."""
        if sequence_ids and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._forget(tuple(sequence_ids)), self._loop)

    def close(self) -> None:
        """End the thread; a call that still runs is given up."""
        if self._loop is not None:
            self._stop()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A daemon: vLLM never says that it is done with a drafter.
            thread = threading.Thread(
                target=_serve, args=(self._loop,), name="ascend-drafts", daemon=True
            )
            thread.start()
            self._stop = weakref.finalize(self, _stop, self._loop, thread)
        return self._loop

    async def _run(self, job: DraftJob) -> None:
        async with self._turn:
            begun = self._clock()
            try:
                proposals = await self._drafter.propose(job.sequences, job.k)
                if len(proposals) != len(job.sequences):
                    raise ValueError(
                        f"drafter {type(self._drafter).__name__} returned {len(proposals)} "
                        f"proposals; allowed is one for each of {len(job.sequences)} sequences"
                    )
                job.proposals = proposals
            except Exception as error:  # noqa: BLE001 - handed to who asked, who counts and logs it
                job.error = error
            finally:
                job.seconds = self._clock() - begun
                job.done.set()

    async def _forget(self, sequence_ids: tuple[int, ...]) -> None:
        async with self._turn:
            for sequence_id in sequence_ids:
                self._drafter.forget(sequence_id)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)
