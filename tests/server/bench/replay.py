"""A server that sends bytes as they are, in the pieces that a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


class Replay:
    def __init__(self, answers: Sequence[Sequence[bytes]], close: bool) -> None:
        self.answers = list(answers)
        self.close = close
        self.connections = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int((head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]) or b"0")
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if self.close:
                    break
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def replaying(*answers: Sequence[bytes], close: bool = False) -> AsyncIterator[tuple[str, Replay]]:
    """Its address, and what it has seen. Each of `answers` answers one request."""
    replay = Replay(answers, close)
    server = await asyncio.start_server(replay.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", replay
    finally:
        server.close()


def events(*data: str, end: bool = True) -> list[bytes]:
    """A chunked answer of server-sent events, an event a chunk."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [f"data: {one}\n\n".encode() for one in data]
    return [head, *(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces), *([b"0\r\n\r\n"] if end else [])]
