"""What running streams notice of a long prompt that comes in: their inter-token latency meanwhile.

    jaxserve serve --port 8000 &
    python benchmarks/long_prompt.py --url http://127.0.0.1:8000

A long prompt enters in chunks of what a step's token budget leaves beside the streams, so a stream waits for one full
step at a time and never for the whole prompt. Both are measured first on the idle server: the whole prefill, and its
last chunk, which looks back the farthest and so takes the longest. Ends with status 1 where a step does not explain
the latency.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

VOCAB = 40_000
"""Prompts are token ids below this."""
SLACK = 1.5
"""A gap may be this many full steps: clients and server share the machine."""


@dataclass(frozen=True)
class Case:
    prompt: int
    """Tokens of the long prompt."""
    chunk: int
    """The server's --max-num-batched-tokens."""
    streams: int
    repeats: int


@dataclass(frozen=True)
class Seen:
    """Seconds."""

    step: float
    """The last full chunk of the prompt, on an idle server."""
    prefill: float
    """The whole prompt, on an idle server."""
    entering: list[float]
    """How long it took beside the streams, each time."""
    quiet: list[float]
    """Gaps between tokens of the streams before it came."""
    gaps: list[float]
    """Gaps while it entered."""


async def measure(url: str, case: Case, seed: int = 0) -> Seen:
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        prefill = await _seconds(http, _prompt(rng, case.prompt))
        shorter = await _seconds(http, _prompt(rng, case.prompt - case.chunk))
        streams = [_Stream(http, _prompt(rng, 16)) for _ in range(case.streams)]
        tasks = [asyncio.create_task(stream.run()) for stream in streams]
        while not all(len(stream.arrivals) > 1 for stream in streams):
            await asyncio.sleep(0.1)
        began = time.monotonic()
        await asyncio.sleep(3)
        quiet = _gaps(streams, began, time.monotonic())
        entering: list[float] = []
        gaps: list[float] = []
        for _ in range(case.repeats):
            began = time.monotonic()
            entering.append(await _seconds(http, _prompt(rng, case.prompt)))
            gaps += _gaps(streams, began, time.monotonic())
            await asyncio.sleep(1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return Seen(prefill - shorter, prefill, entering, quiet, gaps)


class _Stream:
    """A request that goes on until it is cancelled, and when its tokens came."""

    def __init__(self, http: httpx.AsyncClient, prompt: list[int]) -> None:
        self._http = http
        self._body = {
            "prompt": prompt,
            "max_tokens": 6000,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        self.arrivals: list[float] = []

    async def run(self) -> None:
        async with self._http.stream("POST", "/v1/completions", json=self._body) as response:
            async for line in response.aiter_lines():
                if line:
                    self.arrivals.append(time.monotonic())


def _gaps(streams: Sequence[_Stream], began: float, ended: float) -> list[float]:
    """Gaps that end within these seconds."""
    found: list[float] = []
    for stream in streams:
        pairs = zip(stream.arrivals, stream.arrivals[1:], strict=False)
        found += [new - old for old, new in pairs if began <= new <= ended]
    return found


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    """Random, so that no page of it is cached."""
    return [rng.randrange(1, VOCAB) for _ in range(tokens)]


async def _seconds(http: httpx.AsyncClient, prompt: list[int]) -> float:
    """From asking to the first token."""
    began = time.monotonic()
    response = await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    response.raise_for_status()
    return time.monotonic() - began


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Inter-token latency of running streams while a long prompt enters.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the long prompt")
    parser.add_argument("--chunk", type=int, default=512, help="the server's --max-num-batched-tokens")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="how many long prompts come")
    flags = parser.parse_args()
    case = Case(flags.prompt, flags.chunk, flags.streams, flags.repeats)
    seen = asyncio.run(measure(flags.url, case))
    p99 = percentile(seen.gaps, 0.99)
    print(f"{case.streams} streams, while {case.repeats} prompts of {case.prompt} tokens enter one after another")
    print(
        f"inter-token latency before: p50 {percentile(seen.quiet, 0.5):.3f} s, p99 {percentile(seen.quiet, 0.99):.3f} s"
    )
    print(f"inter-token latency during: p50 {percentile(seen.gaps, 0.5):.3f} s, p99 {p99:.3f} s, {len(seen.gaps)} gaps")
    print(f"one full step ({case.chunk} tokens, the last of the prompt) alone: {seen.step:.3f} s")
    print(f"the whole prefill alone: {seen.prefill:.3f} s; beside the streams: {max(seen.entering):.3f} s")
    print(f"p99 is {p99 / seen.step:.2f} full steps, and {p99 / seen.prefill:.0%} of the whole prefill")
    return 0 if p99 <= SLACK * seen.step else 1


if __name__ == "__main__":
    sys.exit(main())
