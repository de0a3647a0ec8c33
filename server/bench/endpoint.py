"""Completions and chats as OpenAI's API wants them asked: a sample becomes a request, its events an `Answer`.

Tokens are counted by the server's usage, never by the events, each of which may bring several.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from server.bench.answers import Answer, Sample
from server.bench.client import Client, ClientError
from server.bench.vocabulary import Vocabulary

PATHS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Where each backend is asked, unless told otherwise."""


class _Function(msgspec.Struct):
    arguments: str | None = None
    name: str | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None
    """In whatever shape; `told` reads it."""


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Whom to ask, and how."""

    client: Client
    path: str
    chat: bool
    model: str
    fields: Mapping[str, object]
    """What every request says besides: sampling, and what the user adds."""
    counting: Vocabulary | None = None
    """Counts the tokens of answers, for servers that tell no usage."""

    async def ask(self, sample: Sample) -> Answer:
        """Never raises for what a server does: an error becomes an answer that names it."""
        body = msgspec.json.encode(self._body(sample))
        events = Events()
        start = time.perf_counter()
        try:
            reply = await self.client.post(self.path, body, lambda piece: events.feed(piece, time.perf_counter()))
            if reply.status != 200:
                return _failed(start, told(reply.body, f"status {reply.status}"), reply.status)
        except ClientError as error:
            return _failed(start, str(error), 0)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _failed(start, f"an event is not what OpenAI's API has: {error}")
        return self._answer(events, sample, start)

    def _body(self, sample: Sample) -> dict[str, object]:
        body: dict[str, object] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            body |= {
                "messages": [{"role": "user", "content": sample.prompt}],
                "max_completion_tokens": sample.output_tokens,
            }
        else:
            body |= {"prompt": sample.prompt, "max_tokens": sample.output_tokens}
        return body | dict(self.fields)

    def _answer(self, events: Events, sample: Sample, start: float) -> Answer:
        if events.error:
            return _failed(start, events.error)
        if events.last is None or not events.ended:
            return _failed(start, "the stream ended before the answer did")
        text = "".join(events.texts)
        usage = events.usage
        if usage is None:
            if self.counting is None:
                return _failed(start, "the server tells no usage; name a tokenizer that counts with --tokenizer")
            usage = _Usage(sample.prompt_tokens, len(self.counting.encode(text, False)))
        return Answer(
            start=start,
            end=events.last,
            arrivals=tuple(events.arrivals) or (events.last,),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            text=text,
        )


class Events:
    """A stream of server-sent events, taken in as it comes."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.texts: list[str] = []
        self.last: float | None = None
        """When the newest event with a choice came."""
        self.usage: _Usage | None = None
        self.error = ""
        self.ended = False
        self._rest = b""

    def feed(self, piece: bytes, now: float) -> None:
        """Takes in what has come of the stream; `now` is when.

        Raises:
            msgspec.DecodeError: an event is not JSON, or not of this shape.
        """
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.ended = True
            return
        event = _decode(data)
        if event.error is not None:
            self.error = self.error or told(data, "the server sent an error")
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices or ():
            self.last = now
            self.ended |= choice.finish_reason is not None
            text = _text(choice)
            if text:
                self.texts.append(text)
                self.arrivals.append(now)


def _text(choice: _Choice) -> str:
    """All that a choice brings, whatever it is: each of it costs tokens."""
    if choice.text:
        return choice.text
    delta = choice.delta
    if delta is None:
        return ""
    if delta.content:
        return delta.content
    calls = "".join(
        (call.function.name or "") + (call.function.arguments or "") for call in delta.tool_calls or () if call.function
    )
    return delta.reasoning or delta.reasoning_content or calls


class _Told(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Told | str | None = None
    message: str | None = None
    detail: str | None = None


def told(body: bytes, otherwise: str) -> str:
    """The message of an error, in OpenAI's shape or a near one."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return otherwise
    error = found.error.message if isinstance(found.error, _Told) else found.error
    message = error or found.message or found.detail
    return f"{otherwise}: {message}" if message else otherwise


def _failed(start: float, error: str, status: int = 200) -> Answer:
    return Answer(start=start, end=time.perf_counter(), error=error, status=status)
