"""An HTTP/1.1 client made for measuring: bodies are taken in where they arrive, without a task that wakes up for each
piece, and connections are used again.

Owns sockets; knows nothing of models or benchmarks.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

CONNECT_SECONDS = 30.0
_LONGEST_HEAD = 1 << 20

Take = Callable[[bytes], None]
"""Is given what has come of a body, as it comes. What it raises ends the exchange and reaches who asked."""


class ClientError(Exception):
    """No answer, or one that broke off; the message says why."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    """Empty where somebody took it."""


class Client:
    """All connections to one server. `url`: http://host:port, perhaps with a path that comes before every other."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Connects to nobody yet.

        Raises:
            ValueError: the address is none.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the server's address must look like http://127.0.0.1:8000, got {url}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        told = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Reply:
        """The whole answer.

        Raises:
            ClientError: there is none.
        """
        return await self._ask(f"GET {self._path}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), None)

    async def post(self, path: str, body: bytes, take: Take | None = None) -> Reply:
        """`take` gets the body of an answer with status 200, that of any other is in the reply.

        Raises:
            ClientError: there is no whole answer.
        """
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self._ask(f"POST {self._path}{path} HTTP/1.1\r\n{self._head}{kind}".encode() + body, take)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _ask(self, request: bytes, take: Take | None) -> Reply:
        """A connection that has been idle may turn out to be closed; then another one is taken."""
        while True:
            idle = self._take_idle()
            connection = idle or await self._connect()
            try:
                reply = await connection.exchange(request, take)
            except _Unanswered as error:
                if idle is None:
                    raise ClientError(f"the server closed the connection without an answer ({error})") from None
                continue
            except BaseException:
                connection.close()
                raise
            if connection.reusable:
                self._idle.append(connection)
            return reply

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise ClientError(f"no server answers at {self._host}:{self._port} ({_why(error)})") from None
        return connection


class _Unanswered(Exception):
    """The connection was closed before anything came."""


class _Connection(asyncio.Protocol):
    """One socket, and at most one exchange on it."""

    def __init__(self) -> None:
        self.reusable = False
        """It is open, and the last answer has come whole."""
        self._transport: asyncio.Transport | None = None
        self._lost: Exception | None = None
        self._waiting: asyncio.Future[Reply] | None = None
        self._take: Take | None = None
        self._head = b""
        self._body: _Body | None = None
        self._status = 0
        self._stays = True
        self._parts: list[bytes] = []

    async def exchange(self, request: bytes, take: Take | None) -> Reply:
        if self._transport is None or self._lost is not None:
            raise _Unanswered(_why(self._lost or ConnectionError("closed")))
        self._waiting = asyncio.get_running_loop().create_future()
        self._take, self._head, self._body, self._parts, self.reusable = take, b"", None, [], False
        self._transport.write(request)
        return await self._waiting

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():
            self.close()
            return
        try:
            self._feed(data)
        except Exception as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._lost = exc or ConnectionError("closed")
        if self._waiting is None or self._waiting.done():
            return
        if self._body is None and not self._head:
            self._fail(_Unanswered(_why(self._lost)))
        elif self._body is None:
            self._fail(_broken("no whole head"))
        elif exc is None and self._body.ends_with_connection:
            self._finish()
        else:
            self._fail(_broken(f"{self._body.missing}; {_why(self._lost)}"))

    def _feed(self, data: bytes) -> None:
        if self._body is None:
            self._head += data
            head, between, data = self._head.partition(b"\r\n\r\n")
            if not between:
                if len(self._head) > _LONGEST_HEAD:
                    raise _broken("a head without end")
                return
            self._begin(head)
        assert self._body is not None
        try:
            piece, ended = self._body.feed(data)
        except ValueError as error:
            raise _broken(str(error)) from None
        if piece:
            if self._take is not None and self._status == 200:
                self._take(piece)
            else:
                self._parts.append(piece)
        if ended:
            self._finish()

    def _begin(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        counts = [*words[1:2], headers.get("content-length", "0")]
        if not words[0].startswith("HTTP/1.") or len(counts) < 2 or not all(count.isdigit() for count in counts):
            raise ClientError(f"the server does not speak HTTP/1.1: {first[:80]!r}")
        self._status = int(words[1])
        self._stays = headers.get("connection", "").lower() != "close"
        self._body = _body_of(headers)

    def _finish(self) -> None:
        assert self._waiting is not None and self._body is not None
        if self._stays and not self._body.ends_with_connection:
            self.reusable = self._lost is None
        else:
            self.close()
        self._waiting.set_result(Reply(self._status, b"".join(self._parts)))

    def _fail(self, error: Exception) -> None:
        assert self._waiting is not None
        self._waiting.set_exception(error)
        self.close()


class _Body(Protocol):
    """How a body is framed."""

    ends_with_connection: bool

    @property
    def missing(self) -> str: ...

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """What `data` adds to the body, and whether that was all.

        Raises:
            ValueError: a frame is none.
        """
        ...


def _body_of(headers: Mapping[str, str]) -> _Body:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _Chunked()
    if "content-length" in headers:
        return _Counted(int(headers["content-length"]))
    return _Endless()


class _Chunked:
    """Gives whole chunks; what has come of the next one waits for the rest."""

    ends_with_connection = False
    missing = "no last chunk"

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        data = self._rest + data if self._rest else data
        chunks: list[bytes] = []
        at, ended = 0, False
        while (end := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:end].partition(b";")[0], 16)
            begin = end + 2
            if size == 0:
                ended = data.find(b"\r\n\r\n", end) >= 0
                break
            if len(data) < begin + size + 2:
                break
            chunks.append(data[begin : begin + size])
            at = begin + size + 2
        self._rest = data[at:]
        return b"".join(chunks), ended


class _Counted:
    ends_with_connection = False

    def __init__(self, length: int) -> None:
        self._left = length

    @property
    def missing(self) -> str:
        return f"{self._left} bytes are missing"

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        piece = data[: self._left]
        self._left -= len(piece)
        return piece, self._left == 0


class _Endless:
    """Until the connection ends."""

    ends_with_connection = True
    missing = ""

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        return data, False


def _broken(why: str) -> ClientError:
    return ClientError(f"the connection broke off in the middle of an answer ({why})")


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__
