"""What stands around the whole app: the path that a proxy shows it under, the count of requests at work, and a way
past all of it for those who send much.
"""

from __future__ import annotations

from typing import cast

from starlette.types import ASGIApp, Receive, Scope, Send

from server.service import Service

_SEND_KEY = "jaxserve.send"


class Direct:
    """ASGI middleware, the outermost: remembers the server's own `send` for `direct_send`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SEND_KEY] = send
        await self._app(scope, receive, send)


def direct_send(scope: Scope, send: Send) -> Send:
    """The server's own `send`, or the one at hand: for bodies, which no middleware looks at and all of it slows down.

    An answer's beginning must not go this way.
    """
    return cast(Send, scope.get(_SEND_KEY, send))


class UnderPath:
    """ASGI middleware: with the root `/llm`, `/llm/x` is `/x`.

    `/x` is itself still: some proxies take the root away.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self._root + "/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root)}
        await self._app(scope, receive, send)


class Counted:
    """ASGI middleware: how many requests to models wait for an answer or the rest of one."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._service.answering += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._service.answering -= 1
