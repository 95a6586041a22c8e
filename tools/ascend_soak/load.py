"""Clients that stream completions, some of which leave in the middle."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any, Final

import attrs
import httpx

PROMPTS: Final = (
    "The import statement",
    "A function definition is an executable statement. Its execution binds the function name in "
    "the current local namespace to a function object",
    "Objects are compared",
    "The for statement is used to iterate over the elements of a sequence (such as a string, tuple "
    "or list) or other iterable object. The expression list is evaluated once",
    "Exceptions are",
    "A class definition",
)
MOST_TOKENS: Final = 48
REQUEST_SECONDS: Final = 120.0
"""A request that takes longer is stuck; on two cores one of 64 takes a few seconds."""


@attrs.define
class Tally:
    """What the clients saw.

    Attributes:
        finished: streams that ended with a finish reason.
        left: streams that their client left in the middle.
        tokens: pieces of text received.
        errors: what went wrong, one line each.
        seconds: duration of every finished stream.
    """

    finished: int = 0
    left: int = 0
    tokens: int = 0
    errors: list[str] = attrs.field(factory=list)
    seconds: list[float] = attrs.field(factory=list)


@attrs.frozen
class Load:
    """How to load a server.

    Attributes:
        url: base address.
        model: served name of the model.
        clients: streams at the same time.
        seconds: how long new streams are started.
        leaving: share of the streams that their client leaves in the middle.
        seed: of prompts, lengths and leaving.
    """

    url: str
    model: str
    clients: int
    seconds: float
    leaving: float
    seed: int


async def run_load(load: Load, tell: Callable[[Tally, float], None]) -> Tally:
    """Run the clients; ``tell`` gets the tally and the seconds left, about once per second."""
    tally, end = Tally(), time.monotonic() + load.seconds
    # A connection for each stream: one that waits for its next request may be closed by the server
    # (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s) just as a late client sends it.
    limits = httpx.Limits(max_connections=load.clients, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(
            base_url=load.url, timeout=REQUEST_SECONDS, limits=limits, trust_env=False
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(load.clients):
            generator = random.Random(f"{load.seed} {number}")  # noqa: S311 - not a secret
            group.create_task(_client(client, load, generator, end, tally))
        while (left := end - time.monotonic()) > 0:
            tell(tally, left)
            await asyncio.sleep(min(1.0, left))
    return tally


async def _client(
    client: httpx.AsyncClient, load: Load, generator: random.Random, end: float, tally: Tally
) -> None:
    while time.monotonic() < end:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await _stream(client, load, generator, tally)
        except TimeoutError:
            tally.errors.append(f"a request was stuck for {REQUEST_SECONDS:.0f} s")
        except (httpx.HTTPError, ValueError, KeyError) as error:
            notes = ", ".join(getattr(error, "__notes__", ()))
            tally.errors.append(f"{type(error).__name__}: {error} {notes}".rstrip())
            await asyncio.sleep(1.0)  # a server that is gone must not be asked in a tight loop


async def _stream(
    client: httpx.AsyncClient, load: Load, generator: random.Random, tally: Tally
) -> None:
    body = {
        "model": load.model,
        "prompt": generator.choice(PROMPTS),
        "max_tokens": generator.randint(1, MOST_TOKENS),
        "temperature": generator.choice((0.0, 0.8)),
        "stream": True,
        "ignore_eos": True,
    }
    leaves_after = None
    if generator.random() < load.leaving:
        leaves_after = generator.randint(0, body["max_tokens"] - 1)
    start, pieces, reason = time.monotonic(), 0, None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if leaves_after is not None and pieces >= leaves_after:
                    tally.left += 1
                    return  # closes the connection
                choice = _choice(line)
                if choice is not None:
                    pieces += bool(choice["text"])
                    tally.tokens += bool(choice["text"])
                    reason = choice["finish_reason"] or reason
    except httpx.HTTPError as error:
        error.add_note(f"after {pieces} pieces")
        raise
    if reason != "length":
        tally.errors.append(f"a stream ended with finish_reason {reason!r} after {pieces} pieces")
        return
    tally.finished += 1
    tally.seconds.append(time.monotonic() - start)


def _choice(line: str) -> dict[str, Any] | None:
    """The choice in a line of the stream; None for empty lines and the end mark."""
    text = line.removeprefix("data: ").strip()
    if not text or text == "[DONE]":
        return None
    data = json.loads(text)
    if "error" in data:
        raise ValueError(f"the server said {data['error']}")
    choices: list[dict[str, Any]] = data["choices"]
    return choices[0] if choices else None
