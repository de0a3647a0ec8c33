"""What stands around the whole app: the path that a proxy shows it under, and the count of requests at work."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from server.service import Service


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
