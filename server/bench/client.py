"""An HTTP/1.1 client made for measuring: bodies as they come, few microseconds a chunk, connections used again.

Owns sockets; knows nothing of models or benchmarks.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

CONNECT_SECONDS = 30.0
_READ = 1 << 16
_HEAD = 1 << 20


class ClientError(Exception):
    """No answer, or one that broke off; the message says why."""


@dataclass(frozen=True, slots=True)
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Response:
    """Status and headers of an answer; its body must be read to the end, or `close` called."""

    def __init__(self, client: Client, connection: Connection, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers
        self._client, self._connection = client, connection

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body, as much at a time as has come.

        Raises:
            ClientError: the connection ended before the body did.
        """
        reader = self._connection.reader
        whole = False
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                async for piece in _chunked(reader):
                    yield piece
                whole = True
            elif "content-length" in self.headers:
                async for piece in _counted(reader, int(self.headers["content-length"])):
                    yield piece
                whole = True
            else:
                while piece := await reader.read(_READ):
                    yield piece
        except (OSError, ValueError, EOFError) as error:
            raise ClientError(f"the connection broke off in the middle of an answer ({_why(error)})") from None
        finally:
            if whole and self.headers.get("connection", "").lower() != "close":
                self._client.give_back(self._connection)
            else:
                self.close()

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        self._connection.writer.close()


class Client:
    """All connections to one server. `url`: http://host:port, perhaps with a path that comes before every other."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the server's address must look like http://127.0.0.1:8000, got {url}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        told = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        self._idle: list[Connection] = []

    async def get(self, path: str) -> Response:
        return await self._ask(f"GET {self._path}{path} HTTP/1.1\r\n{self._head}\r\n".encode())

    async def post(self, path: str, body: bytes) -> Response:
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self._ask(f"POST {self._path}{path} HTTP/1.1\r\n{self._head}{kind}".encode() + body)

    def give_back(self, connection: Connection) -> None:
        """For the next request."""
        self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().writer.close()

    async def _ask(self, request: bytes) -> Response:
        """A connection that has been idle may turn out to be closed; then a new one is taken."""
        while True:
            idle = self._take_idle()
            connection = idle or await self._connect()
            try:
                connection.writer.write(request)
                await connection.writer.drain()
                head = await connection.reader.readuntil(b"\r\n\r\n")
            except (OSError, EOFError, asyncio.LimitOverrunError) as error:
                connection.writer.close()
                if idle is None:
                    raise ClientError(f"the server closed the connection without an answer ({_why(error)})") from None
            except BaseException:
                connection.writer.close()
                raise
            else:
                return self._response(connection, head)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.close()
        return None

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_HEAD))
        except (OSError, TimeoutError) as error:
            raise ClientError(f"no server answers at {self._host}:{self._port} ({_why(error)})") from None

    def _response(self, connection: Connection, head: bytes) -> Response:
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            connection.writer.close()
            raise ClientError(f"the server does not speak HTTP/1.1: {first[:80]!r}")
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return Response(self, connection, int(words[1]), headers)


async def _chunked(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    """Whole chunks; what has come of the next one waits for the rest."""
    buffer = b""
    while True:
        data = await reader.read(_READ)
        if not data:
            raise EOFError("no last chunk")
        buffer += data
        chunks, used, ended = _cut(buffer)
        buffer = buffer[used:]
        if chunks:
            yield b"".join(chunks)
        if ended:
            return


def _cut(buffer: bytes) -> tuple[list[bytes], int, bool]:
    """The chunks that `buffer` begins with, how many bytes they and their frames take, and whether they were all."""
    chunks: list[bytes] = []
    at = 0
    while (end := buffer.find(b"\r\n", at)) >= 0:
        size = int(buffer[at:end].partition(b";")[0], 16)
        if size == 0:
            return chunks, at, buffer.find(b"\r\n\r\n", end) >= 0
        begin = end + 2
        if len(buffer) < begin + size + 2:
            break
        chunks.append(buffer[begin : begin + size])
        at = begin + size + 2
    return chunks, at, False


async def _counted(reader: asyncio.StreamReader, left: int) -> AsyncGenerator[bytes]:
    while left:
        piece = await reader.read(min(left, _READ))
        if not piece:
            raise EOFError(f"{left} bytes are missing")
        left -= len(piece)
        yield piece


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__
