"""Stream long completions until somebody kills this process.

Run as a script: `python streams.py URL MODEL STREAMS TOKENS`. It prints one line once every stream
has begun, and ends by itself only when all have ended.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import httpx

SECONDS: Final = 600.0
"""Between two tokens; whoever started this process ends it long before."""
FIRST_LINES: Final = 8
"""A stream has begun for sure after so many lines of it."""


async def main(url: str, model: str, streams: int, tokens: int) -> None:
    """Stream; raises httpx.HTTPError when the server refuses or goes away."""
    begun = [asyncio.Event() for _ in range(streams)]
    async with (
        httpx.AsyncClient(base_url=url, timeout=SECONDS, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        for number, event in enumerate(begun):
            body = {
                "model": model,
                "prompt": f"{number}: The import statement",
                "max_tokens": tokens,
                "temperature": 0.0,
                "stream": True,
                "ignore_eos": True,
            }
            group.create_task(_stream(client, body, event))
        for event in begun:
            await event.wait()
        print("all have begun", flush=True)


async def _stream(client: httpx.AsyncClient, body: dict[str, object], begun: asyncio.Event) -> None:
    lines = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_lines():
            lines += 1
            if lines == FIRST_LINES:
                begun.set()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
