"""Server-sent events: `data: {json}` and a blank line, `[DONE]` at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.types import Message, Receive, Scope, Send

from server.errors import as_api_error, error_json
from server.outside import direct_send
from server.racing import ClientGone, cancel, race
from server.service import Service

DONE = b"data: [DONE]\n\n"
STILL_HERE = b": still here\n\n"
"""A comment, for proxies that close what is silent; clients skip it."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


TEXT = "\0text\0"
"""Stands for the text in a `Template`'s record."""
_TEXT = _encode(TEXT)


def event(record: msgspec.Struct) -> bytes:
    return b"data: " + _encode(record) + b"\n\n"


class Template:
    """Events that differ in one text only: encoded once, and cut where the text stands."""

    def __init__(self, example: bytes) -> None:
        """`example`: the event whose text is `TEXT`; nothing that a caller chooses may come after it."""
        self._before, _, self._after = example.rpartition(_TEXT)

    def event(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


class EventStream:
    """An ASGI response that sends events as they come.

    An error before the first event is an ordinary error response; a later one is an event, as 200 was said already.
    The generator is closed when the client leaves, and waited for while a slow client does not read.
    """

    def __init__(self, service: Service, events: AsyncGenerator[bytes]) -> None:
        self._service = service
        self._events = events
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = direct_send(scope, send)
        try:
            await race(self._pump(send, direct), receive, self._service.stopping)
        except ClientGone:
            return
        except Exception as error:
            if not self._started:
                raise
            await direct(_more(b"data: " + error_json(as_api_error(error)) + b"\n\n"))
        await direct(_more(DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send, direct: Send) -> None:
        silence = self._service.server.sse_keep_alive_interval
        stream = _with_comments(self._events, silence) if silence else self._events
        async with aclosing(self._events), aclosing(stream):
            async for data in stream:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await direct(_more(data))


async def _with_comments(events: AsyncGenerator[bytes], seconds: float) -> AsyncGenerator[bytes]:
    """`events`, and a comment after every `seconds` without one. The first comment says 200, whatever comes then."""
    while True:
        coming = asyncio.create_task(_next(events))
        try:
            while not (await asyncio.wait((coming,), timeout=seconds))[0]:
                yield STILL_HERE
        finally:
            await cancel(coming)
        data = coming.result()
        if data is None:
            return
        yield data


async def _next(events: AsyncGenerator[bytes]) -> bytes | None:
    return await anext(events, None)


def _more(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
