"""The HTTP client: every way a body may come, connections used again, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from server.bench.client import Client, ClientError
from tests.server.bench.replay import replaying

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1;x=y\r\n!\r\n0\r\n\r\n"
COUNTED = OK + b"Content-Length: 6\r\n\r\nhello!"


def split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def ask(*answers: Sequence[bytes], times: int = 1, close: bool = False) -> tuple[list[bytes], int]:
    """Bodies of so many requests, one after another, and how many connections they took."""

    async def asking() -> tuple[list[bytes], int]:
        async with replaying(*answers, close=close) as (url, replay):
            client = Client(url, {})
            bodies = [(await client.post("/x", b"{}")).body for _ in range(times)]
            client.close()
            return bodies, replay.connections

    return asyncio.run(asking())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("data", [CHUNKED, COUNTED], ids=["chunked", "counted"])
def test_a_body_is_the_same_however_it_is_cut(data: bytes, size: int):
    assert ask(split(data, size)) == ([b"hello!"], 1)


def test_a_body_may_end_with_its_connection():
    assert ask([OK + b"\r\nhello", b"!"], close=True) == ([b"hello!"], 1)


def test_trailers_are_passed_over():
    data = OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX-Sum: 1\r\n\r\n"
    assert ask(split(data, 9), split(data, 9), times=2) == ([b"hi", b"hi"], 1)


def test_a_connection_is_used_again():
    assert ask([CHUNKED], [COUNTED], [CHUNKED], times=3) == ([b"hello!"] * 3, 1)


def test_a_connection_that_was_closed_is_replaced():
    assert ask([COUNTED], [COUNTED], times=2, close=True) == ([b"hello!"] * 2, 2)


def test_a_server_that_says_so_gets_a_new_connection():
    data = OK + b"Connection: close\r\nContent-Length: 0\r\n\r\n"
    assert ask([data], [data], times=2, close=True) == ([b"", b""], 2)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "closed the connection without an answer"),
        (b"HTTP/1.1 200", "broke off in the middle of an answer .no whole head"),
        (b"SSH-2.0 hello\r\n\r\n", "does not speak HTTP/1.1"),
        (OK + b"Content-Length: 9\r\n\r\nhello", "broke off in the middle of an answer"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel", "broke off in the middle of an answer"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "broke off in the middle of an answer"),
    ],
)
def test_broken_answers_are_told(data: bytes, told: str):
    with pytest.raises(ClientError, match=told):
        ask([data], close=True)


def test_pieces_are_taken_as_they_come_but_those_of_an_error_are_kept():
    taken: list[bytes] = []
    error = b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"

    async def asking() -> list[tuple[int, bytes]]:
        async with replaying([OK + b"Content-Length: 4\r\n\r\n", b"ab", b"cd"], [error]) as (url, _):
            client = Client(url, {})
            replies = [await client.post("/x", b"", taken.append) for _ in range(2)]
            client.close()
            return [(reply.status, reply.body) for reply in replies]

    assert asyncio.run(asking()) == [(200, b""), (500, b"oops")]
    assert taken == [b"ab", b"cd"]


def test_what_the_taker_raises_reaches_who_asked():
    def take(_piece: bytes) -> None:
        raise KeyError("no such thing")

    async def asking() -> None:
        async with replaying([COUNTED]) as (url, _):
            await Client(url, {}).post("/x", b"", take)

    with pytest.raises(KeyError, match="no such thing"):
        asyncio.run(asking())


def test_nobody_there_is_told():
    with pytest.raises(ClientError, match=r"no server answers at 127\.0\.0\.1:1"):
        asyncio.run(Client("http://127.0.0.1:1", {}).get("/"))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://"])
def test_an_address_must_be_one(url: str):
    with pytest.raises(ValueError, match="must look like"):
        Client(url, {})


def test_headers_and_the_path_before_the_path_are_sent():
    async def asking() -> bytes:
        async with replaying([COUNTED]) as (url, replay):
            client = Client(f"{url}/behind/", {"Authorization": "Bearer k"})
            await client.get("/v1/models")
            client.close()
            return replay.requests[0]

    head = asyncio.run(asking())
    assert head.startswith(b"GET /behind/v1/models HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer k\r\n" in head
