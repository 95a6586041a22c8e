"""One streamed chat request, measured from outside as a user would."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from ascend_demo.errors import RequestError
from ascend_demo.metrics import Speculation, parse_speculation
from ascend_demo.server import fetch

if TYPE_CHECKING:
    from openai import OpenAI

MODEL_NAME = "SmolLM2-135M-Instruct"
OnText = Callable[[str], None]


@attrs.frozen
class Question:
    """What is asked, and for how many tokens at most."""

    name: str
    prompt: str
    max_tokens: int


@attrs.frozen
class Answer:
    """What came back.

    Attributes:
        question: what was asked.
        text: the whole answer.
        finish_reason: `stop`, or `length` when the limit of tokens was reached.
        prompt_tokens: tokens of the prompt, chat template included.
        tokens: tokens of the answer.
        seconds_to_first_token: from sending the request to the first text.
        seconds: from sending the request to the end of the stream.
        speculation: what was drafted and accepted for this request.
    """

    question: Question
    text: str
    finish_reason: str
    prompt_tokens: int
    tokens: int
    seconds_to_first_token: float
    seconds: float
    speculation: Speculation

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole request, the prompt's computation included."""
        return self.tokens / self.seconds


def connect(url: str, seconds: float) -> OpenAI:
    """Return OpenAI's own client for the server at `url`; no proxy, no retries."""
    from openai import DefaultHttpxClient, OpenAI

    client = DefaultHttpxClient(trust_env=False)
    return OpenAI(
        base_url=f"{url}/v1", api_key="none", http_client=client, timeout=seconds, max_retries=0
    )


def ask(url: str, question: Question, seconds: float, on_text: OnText = lambda _: None) -> Answer:
    """Send `question` with temperature 0 and stream its answer.

    Args:
        url: base address of the server.
        question: what to ask.
        seconds: how long the server may be silent.
        on_text: takes each piece of text as it arrives.

    Raises:
        RequestError: the server refused, broke off, or sent nothing.
    """
    import openai

    try:
        before = parse_speculation(fetch(f"{url}/metrics"))
        with connect(url, seconds) as client:
            measured = _stream(client, question, on_text)
        after = settled_speculation(url)
    except (openai.OpenAIError, OSError, ValueError) as error:
        raise RequestError(f"request {question.name!r} failed: {error}") from error
    return attrs.evolve(measured, speculation=after.since(before))


def _stream(client: OpenAI, question: Question, on_text: OnText) -> Answer:
    pieces: list[str] = []
    first: float | None = None
    reason, usage = "", None
    start = time.monotonic()
    for chunk in client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": question.prompt}],
        temperature=0.0,
        max_completion_tokens=question.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            if choice.delta.content:
                first = first or time.monotonic() - start
                pieces.append(choice.delta.content)
                on_text(choice.delta.content)
    if usage is None or first is None or not reason:
        raise ValueError("the stream ended without text, usage or a finish reason")
    return Answer(
        question=question,
        text="".join(pieces),
        finish_reason=reason,
        prompt_tokens=usage.prompt_tokens,
        tokens=usage.completion_tokens,
        seconds_to_first_token=first,
        seconds=time.monotonic() - start,
        speculation=Speculation(0, 0, 0, ()),
    )


def settled_speculation(url: str, pause: float = 0.3, tries: int = 10) -> Speculation:
    """Read the counters until two readings agree: vLLM counts a step after it streamed it.

    Raises:
        ValueError: they still changed after `tries` readings, so something else asks the server.
    """
    last = parse_speculation(fetch(f"{url}/metrics"))
    for _ in range(tries):
        time.sleep(pause)
        now = parse_speculation(fetch(f"{url}/metrics"))
        if now == last:
            return now
        last = now
    raise ValueError("the speculation counters keep changing; is another client asking?")
