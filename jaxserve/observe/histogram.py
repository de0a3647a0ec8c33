"""Counts by bucket, for one writer: cheap enough for every token."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

SECONDS_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
SECONDS_PER_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
SECONDS_OF_A_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TOKENS_OF_A_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)


class Histogram:
    """How many values fell under each bound. One thread observes; any thread may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        counts, bounds, total = self._counts, self._bounds, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.sum += total

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and cumulative count, as Prometheus wants them; the last bound is +Inf."""
        found: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, math.inf), list(self._counts), strict=True):
            total += count
            found.append(("+Inf" if bound == math.inf else str(float(bound)), total))
        return found


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20 ... as far as they do not exceed `most`."""
    found: list[int] = []
    power = 1
    while power <= most:
        found += [step * power for step in (1, 2, 5) if step * power <= most]
        power *= 10
    return tuple(found)
