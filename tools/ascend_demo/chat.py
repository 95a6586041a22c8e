"""One streamed request, a chat or a completion, measured from outside as a user would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import attrs

from ascend_demo.errors import RequestError
from ascend_demo.metrics import Speculation, parse_speculation
from ascend_demo.server import fetch

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import CompletionUsage

MODEL_NAME = "SmolLM2-135M-Instruct"
Counted = TypeVar("Counted")
OnText = Callable[[str], None]
Piece: TypeAlias = "tuple[str, str | None, CompletionUsage | None]"
"""Part of a stream: text, what ended the answer, tokens counted."""
Pieces: TypeAlias = "Callable[[OpenAI, Question], Iterator[Piece]]"


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

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token after the first one; needs at least two tokens."""
        return (self.seconds - self.seconds_to_first_token) / (self.tokens - 1)


def connect(url: str, seconds: float) -> OpenAI:
    """Return OpenAI's own client for the server at `url`; no proxy, no retries."""
    from openai import DefaultHttpxClient, OpenAI

    client = DefaultHttpxClient(trust_env=False)
    return OpenAI(
        base_url=f"{url}/v1", api_key="none", http_client=client, timeout=seconds, max_retries=0
    )


def ask(url: str, question: Question, seconds: float, on_text: OnText = lambda _: None) -> Answer:
    """Send `question` as a chat with temperature 0 and stream its answer.

    Args:
        url: base address of the server.
        question: what to ask.
        seconds: how long the server may be silent.
        on_text: takes each piece of text as it arrives.

    Raises:
        RequestError: the server refused, broke off, or sent nothing.
    """
    return _measured(url, question, seconds, on_text, _chat_pieces)


def complete(
    url: str, question: Question, seconds: float, on_text: OnText, *, speculates: bool
) -> Answer:
    """Have the server continue a prompt greedily, for exactly `max_tokens` tokens; see `ask`.

    Args:
        url: base address of the server.
        question: the prompt.
        seconds: how long the server may be silent.
        on_text: takes each piece of text as it arrives.
        speculates: whether the server counts drafts; without, none are reported.

    Raises:
        RequestError: the server refused, broke off, or sent nothing.
    """
    return _measured(url, question, seconds, on_text, _completion_pieces, speculates)


def _measured(
    url: str,
    question: Question,
    seconds: float,
    on_text: OnText,
    pieces: Pieces,
    speculates: bool = True,
) -> Answer:
    import openai

    before = after = Speculation(0, 0, 0, ())
    try:
        if speculates:
            before = parse_speculation(fetch(f"{url}/metrics"))
        with connect(url, seconds) as client:
            measured = _stream(pieces(client, question), question, on_text)
        if speculates:
            after = settled(url, parse_speculation)
    except (openai.OpenAIError, OSError, ValueError) as error:
        raise RequestError(f"request {question.name!r} failed: {error}") from error
    return attrs.evolve(measured, speculation=after.since(before))


def _chat_pieces(client: OpenAI, question: Question) -> Iterator[Piece]:
    for chunk in client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": question.prompt}],
        temperature=0.0,
        max_completion_tokens=question.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            yield choice.delta.content or "", choice.finish_reason, None
        yield "", None, chunk.usage


def _completion_pieces(client: OpenAI, question: Question) -> Iterator[Piece]:
    for chunk in client.completions.create(
        model=MODEL_NAME,
        prompt=question.prompt,
        temperature=0.0,
        max_tokens=question.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ):
        for choice in chunk.choices:
            yield choice.text or "", choice.finish_reason, None
        yield "", None, chunk.usage


def _stream(stream: Iterator[Piece], question: Question, on_text: OnText) -> Answer:
    pieces: list[str] = []
    first: float | None = None
    reason, usage = "", None
    start = time.monotonic()
    for text, ended_by, counted in stream:
        usage, reason = counted or usage, ended_by or reason
        if text:
            first = first or time.monotonic() - start
            pieces.append(text)
            on_text(text)
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


def settled(
    url: str, parse: Callable[[str], Counted], pause: float = 0.3, tries: int = 10
) -> Counted:
    """Read counters until two readings agree: vLLM counts a step after it streamed it.

    Args:
        url: base address of the server.
        parse: takes the text of `/metrics`.
        pause: seconds between two readings.
        tries: how many readings at most.

    Raises:
        ValueError: they still changed after `tries` readings, so something else asks the server.
    """
    last = parse(fetch(f"{url}/metrics"))
    for _ in range(tries):
        time.sleep(pause)
        now = parse(fetch(f"{url}/metrics"))
        if now == last:
            return now
        last = now
    raise ValueError("the counters keep changing; is another client asking?")
