"""API keys: who may ask. Every path is closed without one, but for those that machines poll."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError, error_response


class ApiKeys:
    """ASGI middleware. Keys are compared as bytes, by digest and in constant time, all of them every time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: frozenset[str]) -> None:
        """`open_paths` need no key, spelled exactly so."""
        self._app = app
        self._open = open_paths
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closed = scope["type"] == "http" and bool(self._digests) and scope["path"] not in self._open
        if closed and not self._knows(_token(scope)):
            await error_response(_REFUSED)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, token: bytes) -> bool:
        given = _digest(token)
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(found)


_REFUSED = ApiError(
    401,
    "send an API key of this server: 'Authorization: Bearer KEY'",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _token(scope: Scope) -> bytes:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            return token.strip() if scheme.lower() == b"bearer" else b""
    return b""
