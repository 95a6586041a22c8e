"""Kill a client in the middle of long streams, and see that the server frees what they held.

vLLM 0.30 counts no request of a client that went away: `vllm:request_success_total` with the reason
`abort` stays as it was. What tells an aborted stream from one that ran to its end without a reader
is how many steps the engine took, because every token of a stream needs one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
from ascend_demo.metrics import parse_steps
from ascend_demo.server import fetch

from ascend_soak import streams, watch

STREAMS: Final = 2
TOKENS: Final = 7500
"""As many as the KV cache of the soak has room for: on a busy machine an engine is thousands of
tokens ahead of what a client has read."""
ATTEMPTS: Final = 3
"""Clients that are killed at most, when one was killed too late to show an abort."""
_RUNNING: Final = "vllm:num_requests_running"
_CACHE: Final = "vllm:kv_cache_usage_perc"


@attrs.frozen
class KilledClients:
    """What happened to the streams of a client that was killed.

    Attributes:
        streams: how many it had.
        tokens: of each stream, had nobody killed the client.
        ran: how many ran just before.
        cache: share of the KV cache in use just before.
        begun: steps that the engine had taken for them just before.
        left: what the server held when the wait was over, by metric; empty if nothing.
        seconds: from the kill until the server held nothing, or until the wait was over.
        steps: that the engine took for them; as many as `tokens` end them without an abort.
        finished: how many ran to their end.
        aborted: how many vLLM counts as aborted (none in 0.30).
    """

    streams: int
    tokens: int
    ran: int
    cache: float
    begun: int
    left: dict[str, float]
    seconds: float
    steps: int
    finished: int
    aborted: int

    @property
    def late(self) -> bool:
        """Whether they had ended, or used up the steps that are allowed, before the kill."""
        return self.ran < self.streams or self.begun > self.tokens / 2

    def problems(self) -> list[str]:
        """What does not hold, one line each."""
        told = f"{self.streams} streams of a killed client"
        checks = {
            f"{told}: {self.ran} ran when it was killed": self.ran == self.streams,
            f"{told} held no KV cache before it was killed": self.cache > 0,
            f"{told}: after {self.seconds:.0f} s the server holds {self.left}": not self.left,
            f"{told}: {self.finished} ran to their end": self.finished == 0,
            f"{told} were freed after {self.steps} steps; allowed is half of {self.tokens}, "
            "with which they end by themselves": self.steps <= self.tokens / 2,
        }
        return [problem for problem, holds in checks.items() if not holds]

    def numbers(self) -> dict[str, Any]:
        """The counts, for people and --json."""
        return {
            "killed_streams": self.streams,
            "killed_streams_tokens": self.tokens,
            "killed_streams_steps": self.steps,
            "killed_streams_cache": round(self.cache, 4),
            "killed_streams_freed_seconds": round(self.seconds, 2),
            "killed_streams_counted_as_aborted": self.aborted,
        }


def kill_clients(url: str, model: str, seconds: float, tokens: int = TOKENS) -> KilledClients:
    """Kill a client of an idle server in time, and wait until the server holds nothing.

    Args:
        url: base address of the server.
        model: its served name.
        seconds: how long the server may take to free what it held.
        tokens: length of each stream.

    Raises:
        RuntimeError: the client ended before its streams had begun.
        OSError: the server does not answer.
    """
    for _ in range(ATTEMPTS):
        found = _kill_client(url, model, seconds, tokens)
        if found.left or not found.late:
            break
    return found


def _kill_client(url: str, model: str, seconds: float, tokens: int) -> KilledClients:
    before = fetch(url + "/metrics")
    with _streaming(url, model, tokens) as client:
        middle = fetch(url + "/metrics")
        client.kill()
        killed = time.monotonic()
        left = watch.wait_until_free(url, seconds)
    freed, after = time.monotonic() - killed, fetch(url + "/metrics")
    reasons = ("length", "abort")
    ended = [watch.ended(after, reason) - watch.ended(before, reason) for reason in reasons]
    held, earlier = watch.held(middle), parse_steps(before)
    return KilledClients(
        streams=STREAMS,
        tokens=tokens,
        ran=int(held[_RUNNING]),
        cache=held[_CACHE],
        begun=parse_steps(middle) - earlier,
        left=left,
        seconds=freed,
        steps=parse_steps(after) - earlier,
        finished=ended[0],
        aborted=ended[1],
    )


@contextmanager
def _streaming(url: str, model: str, tokens: int) -> Iterator[subprocess.Popen[str]]:
    """A client process whose streams have all begun; it is gone at the end."""
    command = [sys.executable, str(Path(streams.__file__)), url, model, str(STREAMS), str(tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None  # noqa: S101  # it is a pipe: told to Popen above
            if not client.stdout.readline():
                raise RuntimeError(f"the client of {STREAMS} streams ended with {client.wait()}")
            yield client
        finally:
            client.kill()
