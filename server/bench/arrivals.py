"""When requests come: at once, at random with a mean rate, or ever faster; and no more at a time than is allowed.

Knows neither HTTP nor what is asked.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from server.bench.answers import Answer, Load, Sample

type Strategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that goes from `start` to `end` requests a second."""

    strategy: Strategy
    start: float
    end: float

    def rate(self, share: float) -> float:
        """After this share of the requests, 0..1."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * share
        return self.start * (self.end / self.start) ** share


def offsets(count: int, rate: float, burstiness: float, seed: int, ramp: Ramp | None = None) -> list[float]:
    """Seconds after the beginning at which each of `count` requests comes.

    Gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is even.
    Without a ramp they are scaled so that the last request comes at exactly count / rate.
    """
    if math.isinf(rate) and ramp is None:
        return [0.0] * count
    draw = random.Random(seed)
    gaps: list[float] = []
    for index in range(count):
        now = rate if ramp is None else ramp.rate(index / max(count - 1, 1))
        gaps.append(draw.gammavariate(burstiness, 1 / (now * burstiness)))
    times = list(itertools.accumulate(gaps))
    if ramp is not None or not times or not times[-1]:
        return times
    scale = count / rate / times[-1]
    return [at * scale for at in times]


async def run_load(
    ask: Callable[[Sample], Awaitable[Answer]],
    samples: Sequence[Sample],
    times: Sequence[float],
    max_concurrency: int | None,
    done: Callable[[], object] = lambda: None,
) -> Load:
    """Asks each sample at its time, or as soon after it as a place is free; its own clock begins then.

    `done` is called after each answer.
    """
    places = asyncio.Semaphore(max_concurrency or max(len(samples), 1))

    async def one(sample: Sample) -> Answer:
        async with places:
            answer = await ask(sample)
        done()
        return answer

    tasks: list[asyncio.Task[Answer]] = []
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for sample, at in zip(samples, times, strict=True):
            wait = begin + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(sample)))
    return Load(tuple(task.result() for task in tasks), time.perf_counter() - begin)
