"""What one stream and /health feel while others send what no server should choke on.

    jaxserve serve --port 8000 &
    python benchmarks/hostile.py --url http://127.0.0.1:8000

Each attack has the statuses that are right for it. Printed beside it: how many requests, their statuses, the longest
gap between two tokens of a stream that runs all along, and the slowest answer of /health. Ends with status 1 where a
status is wrong, where /health took more than a second, or where the server is not empty afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from urllib.parse import urlsplit

import httpx

LIMIT = 1.0
"""Seconds that /health may take."""
READ_AFTER = 5.0
"""Seconds before the slow reader reads."""
LONG = 150
"""Tokens of the slow reader's answer."""

REGEXES = ["(a|b)*c(a|b){5000}", ".*a.{20}", "(x+x+)+y", r"(.*a.{30}){10}|(.*b.{30}){10}", r"\w{1,100000}", "(" * 9999]
SCHEMAS: list[object] = [
    {"enum": [f"value {i}" for i in range(30_000)]},
    {
        "anyOf": [
            {"type": "object", "properties": {f"p{i}_{j}": {"type": "string"} for j in range(50)}} for i in range(99)
        ]
    },
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"type": "integer", "multipleOf": 1_000_000_007},
    {"type": "array", "minItems": 10**9, "items": {"type": "string", "pattern": "(a?){50}a{50}"}},
]


class Victim:
    """A stream that is renewed whenever it ends, and a poll of /health, in a process that the attacks do not keep busy.

    `gap` and `health` are the longest seconds since the last look.
    """

    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._gap, self._health = context.Value("d", 0.0), context.Value("d", 0.0)
        self._process = context.Process(target=_suffer, args=(url, self._gap, self._health), daemon=True)
        self._process.start()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def taken(self) -> tuple[float, float]:
        """Gap and /health, which begin anew."""
        found = self._gap.value, self._health.value
        self._gap.value = self._health.value = 0.0
        return found

    def end(self) -> None:
        self._process.terminate()
        self._process.join()


def _suffer(url: str, gap: Synchronized[float], health: Synchronized[float]) -> None:
    asyncio.run(_both(url, gap, health))


async def _both(url: str, gap: Synchronized[float], health: Synchronized[float]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        await asyncio.gather(_stream(http, gap), _poll(http, health))


async def _stream(http: httpx.AsyncClient, gap: Synchronized[float]) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True, "stream": True}
    while True:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            last: float | None = None
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    gap.value = max(gap.value, 0.0 if last is None else now - last)
                    last = now


async def _poll(http: httpx.AsyncClient, health: Synchronized[float]) -> None:
    while True:
        began = time.perf_counter()
        (await http.get("/health")).raise_for_status()
        health.value = max(health.value, time.perf_counter() - began)
        await asyncio.sleep(0.05)


@dataclass(frozen=True)
class Attack:
    """Requests that are sent together, and which statuses are right."""

    name: str
    send: Callable[[httpx.AsyncClient], Awaitable[list[int]]]
    right: frozenset[int]


def posts(name: str, path: str, bodies: list[object], *right: int) -> Attack:
    """Bodies as JSON, or as they are where they are bytes."""

    async def send(http: httpx.AsyncClient) -> list[int]:
        contents = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]
        headers = {"content-type": "application/json"}
        answers = await asyncio.gather(*(http.post(path, content=c, headers=headers) for c in contents))
        return [answer.status_code for answer in answers]

    return Attack(name, send, frozenset(right))


def shaped(shape: dict[str, object]) -> dict[str, object]:
    messages = [{"role": "user", "content": "Say something."}]
    return {"messages": messages, "max_tokens": 24, "temperature": 1, "structured_outputs": shape}


def attacks() -> list[Attack]:
    text, chat = "/v1/completions", "/v1/chat/completions"
    one = {"prompt": "x", "max_tokens": 1}
    nested = b'{"prompt": "x", "a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    return [
        Attack("nothing", _wait, frozenset()),
        posts("a prompt of 20 MB", text, [{"prompt": "word " * 4_000_000}], 400, 413),
        posts("a message of 20 MB", chat, [{"messages": [{"role": "user", "content": "word " * 4_000_000}]}], 400, 413),
        posts("a body of 40 MB", text, [{"prompt": "word " * 8_000_000}], 413),
        posts("3,000 prompts in one request", text, [{"prompt": ["x"] * 3000}], 400),
        posts("1,000 prompts in one request", text, [{"prompt": ["x"] * 1000, "max_tokens": 1}], 200),
        posts("500 requests at once", text, [one] * 500, 200),
        posts("n of a million", text, [one | {"n": 10**6}], 400),
        posts("50,000 nested brackets", text, [nested, nested.replace(b'"a"', b'"stop"')], 200, 400),
        posts("3,000 wrong parts", chat, [{"messages": [{"role": "user", "content": [{"type": 1}] * 3000}]}], 400),
        posts("NaN and infinity", text, [b'{"prompt": "x", "temperature": %s}' % v for v in (b"NaN", b"1e999")], 400),
        posts("seeds beyond 64 bits", text, [one | {"seed": seed} for seed in (2**63, 2**64, 10**30, "1")], 400),
        posts("unknown token ids", text, [{"prompt": [ids]} for ids in (10**6, -1, 10**30)], 400),
        posts("biases of unknown tokens", text, [one | {"logit_bias": {"99999999": 1}}], 400),
        Attack("a client that does not read", _slow_reader, frozenset({LONG})),
        posts("wild regexes", chat, [shaped({"regex": regex}) for regex in REGEXES * 3], 200, 400),
        posts("wild schemas", chat, [shaped({"json": schema}) for schema in SCHEMAS * 3], 200, 400),
    ]


async def _wait(_http: httpx.AsyncClient) -> list[int]:
    await asyncio.sleep(5)
    return []


async def _slow_reader(http: httpx.AsyncClient) -> list[int]:
    """Tokens of a long answer with log probabilities, of which nothing is read for a while."""
    return [await asyncio.to_thread(_read_late, str(http.base_url))]


def _read_late(url: str) -> int:
    body = {
        "prompt": "x",
        "max_tokens": LONG,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 5,
        "return_token_ids": True,
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\nConnection: close\r\n"
    with socket.socket() as plug:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        plug.connect((urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80))
        plug.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        time.sleep(READ_AFTER)
        found = b""
        while piece := plug.recv(65536):
            found += piece
    return sum(len(json.loads(ids)) for ids in re.findall(rb'"token_ids":(\[[\d,]*\])', found))


async def gauges(http: httpx.AsyncClient) -> dict[str, float]:
    text = (await http.get("/metrics")).text
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "process_resident_memory_bytes")
    return {name: float(re.search(rf"{name}(?:{{[^}}]*}})? ([\d.e+-]+)", text)[1]) for name in names}  # type: ignore[index]


async def run(url: str) -> bool:
    """Whether everything was right."""
    right = True
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=2000)) as http:
        before = await gauges(http)
        victim = Victim(url)
        await asyncio.sleep(5)
        print(f"{'attack':32s} {'statuses':20s} {'seconds':>8s} {'gap':>7s} {'/health':>8s}")
        for attack in attacks():
            victim.taken()
            began = time.perf_counter()
            found = Counter(await attack.send(http))
            seconds = time.perf_counter() - began
            await asyncio.sleep(0.5)
            gap, health = victim.taken()
            wrong = not set(found) <= attack.right or health > LIMIT or not victim.alive
            right = right and not wrong
            told = " ".join(f"{n}x{status}" for status, n in sorted(found.items()))
            mark = "  WRONG" * wrong
            print(f"{attack.name:32s} {told:20s} {seconds:8.1f} {gap:7.2f} {health:8.3f}{mark}", flush=True)
        victim.end()
        await asyncio.sleep(3)
        after = await gauges(http)
    left = {name: value for name, value in after.items() if value and "memory" not in name}
    memory = [g["process_resident_memory_bytes"] / 2**20 for g in (before, after)]
    print(f"left behind: {left or 'nothing'}; memory {memory[0]:.0f} -> {memory[1]:.0f} MiB")
    return right and not left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    sys.exit(not asyncio.run(run(parser.parse_args().url)))


if __name__ == "__main__":
    main()
