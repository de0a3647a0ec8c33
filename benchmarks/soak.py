"""A running server under many streaming clients of which a third leaves in the middle of an answer, round after round.

    jaxserve serve --port 8000 &
    python benchmarks/soak.py --url http://127.0.0.1:8000

After every round the server must be empty: nothing running, nothing waiting, every KV page free or cached; and its
resident memory, once warm, must not grow. All of it is read from /metrics. Ends with status 1 where that is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import httpx

STEADY = 1.02
"""Memory of the later rounds may be this many times that of the earlier ones."""
ROUNDS_TO_WARM = 2


@dataclass(frozen=True)
class Crowd:
    """Who asks for what. Lengths are upper ends; each client draws its own."""

    clients: int = 64
    rounds: int = 10
    prompt: int = 200
    answer: int = 96
    vocab: int = 40_000
    """Prompts are token ids below this."""
    seed: int = 0


@dataclass(frozen=True)
class Metrics:
    """What the server says of itself."""

    running: float
    waiting: float
    kv_usage: float
    """Share of the pages that a sequence holds."""
    memory: float
    """Resident bytes."""

    @property
    def empty(self) -> bool:
        return self.running == self.waiting == self.kv_usage == 0


@dataclass(frozen=True)
class Round:
    """One crowd that came and went."""

    seconds: float
    ended: int
    left: int
    pieces: int
    """Events with text that arrived."""
    after: Metrics


async def soak(url: str, crowd: Crowd) -> AsyncIterator[Round]:
    """The rounds as they end.

    Raises:
        httpx.HTTPError, httpx.StreamError: the server refused or failed a request.
        TimeoutError: it was not empty ten seconds after the last client.
    """
    rng = random.Random(crowd.seed)
    limits = httpx.Limits(max_connections=crowd.clients + 1)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as http:
        prefix = [rng.randrange(1, crowd.vocab) for _ in range(crowd.prompt // 2)]
        for _ in range(crowd.rounds):
            began = time.monotonic()
            clients = [_Client(http, crowd, prefix, rng.randrange(2**32), i % 3 == 0) for i in range(crowd.clients)]
            await asyncio.gather(*(client.ask() for client in clients))
            seconds = time.monotonic() - began
            left = sum(client.left for client in clients)
            pieces = sum(client.pieces for client in clients)
            yield Round(seconds, len(clients) - left, left, pieces, await _emptied(http))


class _Client:
    """One request. Half of those who leave do so before they have read anything."""

    def __init__(self, http: httpx.AsyncClient, crowd: Crowd, prefix: list[int], seed: int, leaves: bool) -> None:
        rng = random.Random(seed)
        own = [rng.randrange(1, crowd.vocab) for _ in range(rng.randint(1, crowd.prompt // 2))]
        self._http = http
        self._patience = rng.uniform(0, 2) if leaves and rng.random() < 0.5 else None
        self._reads = rng.randint(1, crowd.answer // 2) if leaves and self._patience is None else None
        self._body = {
            "prompt": prefix + own if rng.random() < 0.5 else own,
            "max_tokens": rng.randint(crowd.answer // 2 + 1, crowd.answer),
            "ignore_eos": True,
            "seed": seed % 1000,
            "stream": True,
        }
        self.pieces = 0
        self.left = False

    async def ask(self) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._read()
        except TimeoutError:
            self.left = True

    async def _read(self) -> None:
        async with self._http.stream("POST", "/v1/completions", json=self._body) as response:
            if response.is_error:
                await response.aread()
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if '"error"' in line:
                    raise httpx.StreamError(line)
                self.pieces += bool(line)
                if self.pieces == self._reads:
                    self.left = True
                    return
        raise httpx.StreamError("an answer stopped before its end")


async def _emptied(http: httpx.AsyncClient) -> Metrics:
    """What /metrics says once nothing is running any more."""
    async with asyncio.timeout(10):
        while not (found := metrics_of((await http.get("/metrics")).text)).empty:
            await asyncio.sleep(0.05)
    return found


def metrics_of(page: str) -> Metrics:
    """Whatever prefix the names have."""

    def value(name: str) -> float:
        found = re.search(rf"^(?:\w+:)?{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
        if found is None:
            raise ValueError(f"/metrics has no {name}")
        return float(found[1])

    return Metrics(
        value("num_requests_running"),
        value("num_requests_waiting"),
        value("kv_cache_usage_perc"),
        value("process_resident_memory_bytes"),
    )


def growth(rounds: list[Round]) -> float:
    """Memory of the second half of the warm rounds, at its largest, over that of the first half."""
    memory = [r.after.memory for r in rounds[ROUNDS_TO_WARM:]]
    half = len(memory) // 2
    return max(memory[half:]) / max(memory[:half]) if half else 1.0


def words(number: int, r: Round) -> Iterator[str]:
    yield f"round {number:2d}: {r.seconds:5.1f} s, {r.ended} ended, {r.left} left, {r.pieces / r.seconds:.0f} pieces/s,"
    yield f"running {r.after.running:.0f}, waiting {r.after.waiting:.0f}, KV held {r.after.kv_usage:.1%},"
    yield f"memory {r.after.memory / 2**20:.0f} MiB"


async def main() -> int:
    parser = argparse.ArgumentParser(description="Soaks a running server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--answer", type=int, default=96, help="tokens of the longest answer")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    crowd = Crowd(flags.clients, flags.rounds, answer=flags.answer, seed=flags.seed)
    rounds: list[Round] = []
    try:
        async for one in soak(flags.url, crowd):
            rounds.append(one)
            print(*words(len(rounds), one), flush=True)
    except (httpx.HTTPError, httpx.StreamError, TimeoutError) as error:
        print(f"error: {error!r}", file=sys.stderr)
        return 1
    factor = growth(rounds)
    print(f"memory after the first {ROUNDS_TO_WARM} rounds: {factor - 1:+.2%} (at most {STEADY - 1:+.0%})")
    return 0 if factor <= STEADY else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
