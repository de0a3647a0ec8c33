"""Names of requests: `X-Request-Id` in and out, and the `id` of answers.

A caller's id is shown back as it is, and trusted for nothing else.
"""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_ID = 128
_SCOPE_KEY = "jaxserve.request_id"


class RequestIds:
    """ASGI middleware: every answer carries the request's `X-Request-Id`, or a new one, unless it is not `shown`."""

    def __init__(self, app: ASGIApp, *, shown: bool = True) -> None:
        self._app = app
        self._shown = shown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        found = given if _is_fit(given) else uuid.uuid4().hex
        scope[_SCOPE_KEY] = found

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                MutableHeaders(scope=message).setdefault("x-request-id", found)
            await send(message)

        await self._app(scope, receive, named if self._shown else send)


def response_id(prefix: str, request: Request, asked: str | None) -> str:
    """`prefix-ID`, with the body's `request_id` or else the header's."""
    return f"{prefix}-{asked or request.scope[_SCOPE_KEY]}"


def _is_fit(text: str) -> bool:
    return 0 < len(text) <= MAX_ID and text.isascii() and text.isprintable()
