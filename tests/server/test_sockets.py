"""Over a real socket: clients that leave, clients that do not read, many at once, and the openai package."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from jaxserve.types import CompletionOutput, RequestOutput, SamplingParams
from server.body import MAX_BODY
from tests.server.conftest import make_service
from tests.server.fake_engine import FakeEngine, wait_for

LONG = {"prompt": "a", "max_tokens": 1000, "temperature": 0}


def post_and_leave(port: int, body: dict, read: int) -> None:
    """Sends a request, reads some bytes of the answer, and closes the connection."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", port)) as peer:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        peer.sendall(head.encode() + data)
        got = 0
        while got < read:
            got += len(peer.recv(read))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
def test_a_client_that_leaves_ends_its_requests_at_once(live, stream: bool, prompt: object) -> None:
    engine = FakeEngine(delay=0.005)
    server = live(make_service(engine))
    if stream:
        post_and_leave(server.port, LONG | {"prompt": prompt, "stream": True}, read=2000)
    else:
        data = json.dumps(LONG | {"prompt": prompt}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as peer:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            peer.sendall(head.encode() + data)
            wait_for(lambda: len(engine.running) == (1 if prompt == "a" else 3))
    wait_for(lambda: not engine.running, 0.5)
    assert len(engine.aborted) == (1 if prompt == "a" else 3)


def test_a_client_that_leaves_while_its_request_waits(live) -> None:
    engine = FakeEngine(delay=30)
    server = live(make_service(engine))
    data = json.dumps(LONG | {"stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        peer.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_for(lambda: bool(engine.running))
    wait_for(lambda: not engine.running, 0.5)


def test_a_client_that_does_not_read_holds_only_itself_up(live) -> None:
    engine = FakeEngine()
    generate = engine.generate
    made = 0

    async def much(prompt: list[int], params: SamplingParams, request_id: str, **more: object):
        nonlocal made
        if params.max_tokens == 5:
            async for output in generate(prompt, params, request_id):
                yield output
            return
        for made in range(1, 5001):
            piece = CompletionOutput(0, "x" * 10_000, (1,), finish_reason="length" if made == 5000 else None)
            yield RequestOutput(request_id, None, (), (piece,), made == 5000)
            await asyncio.sleep(0)

    engine.generate = much  # type: ignore[method-assign]
    server = live(make_service(engine))
    body = json.dumps(LONG | {"stream": True}).encode()
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        peer.connect(("127.0.0.1", server.port))
        peer.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: made > 1)
        time.sleep(0.3)
        held = made
        other = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 5}, timeout=10)
        assert other.status_code == 200
        assert made == held < 5000, "the stream must be held back"
        peer.settimeout(10)
        tail, size = b"", 0
        while not tail.endswith(b"0\r\n\r\n"):
            data = peer.recv(1_000_000)
            size, tail = size + len(data), (tail + data)[-100:]
    assert b"data: [DONE]" in tail
    assert size > 5000 * 10_000


def test_who_sends_too_much_hears_so(live) -> None:
    """And does not find the connection reset in the middle of sending."""
    server = live(make_service(FakeEngine()))
    answer = httpx.post(f"{server.url}/v1/completions", content=b" " * (MAX_BODY + 8_000_000), timeout=30)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_one_id_for_many_requests_never_crosses_answers(live) -> None:
    server = live(make_service(FakeEngine(delay=0.001)))

    def ask(letter: str) -> str:
        body = {"prompt": letter, "max_tokens": 8, "temperature": 0, "request_id": "same"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "same"}).json()
        assert answer["id"] == "cmpl-same"
        return answer["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, "aceg" * 4)) == ["bcdefghi", "defghijk", "fghijklm", "hijklmno"] * 4


def test_health_answers_while_a_large_prompt_is_read(live, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(max_model_len=10_000_000)
    encode = engine.tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        time.sleep(2.0)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "encode", slow)
    server = live(make_service(engine))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{server.url}/tokenize", json={"prompt": "x" * 1_000_000}, timeout=30)
        worst = 0.0
        while not asked.done():
            began = time.monotonic()
            httpx.get(f"{server.url}/health", timeout=30)
            worst = max(worst, time.monotonic() - began)
        assert asked.result().json()["count"] == 1_000_001
    assert worst < 1.0


def test_many_clients_of_which_a_third_leaves(live) -> None:
    engine = FakeEngine(delay=0.002)
    server = live(make_service(engine))

    async def one(client: httpx.AsyncClient, i: int) -> None:
        body = {"prompt": "a", "max_tokens": 30, "temperature": 0, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = 0
            async for line in response.aiter_lines():
                lines += bool(line)
                if i % 3 == 0 and lines == i % 7 + 1:
                    return
            assert lines == 31

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30) as client:
            await asyncio.gather(*(one(client, i) for i in range(64)))

    asyncio.run(all_of_them())
    wait_for(lambda: not engine.running)
    assert len(engine.seen) == 64


def test_the_openai_package_lists_models_and_chats(live) -> None:
    server = live(make_service(FakeEngine(), api_key=("key",)))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)
    assert [m.id for m in client.models.list()] == ["toy", "alias"]
    messages: list = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model="toy", messages=messages, max_tokens=5, temperature=0)
    assert answer.choices[0].message.content == "abcde"
    chunks = client.chat.completions.create(model="toy", messages=messages, max_tokens=5, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "abcde"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=messages)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
