"""Seconds of work on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax


def seconds(work: Callable[[], object], *, calls: int, rounds: int = 5) -> float:
    """Of one call: the median of rounds of `calls` calls that are queued one after the other, the first one left out.

    `work` is compiled and returns its arrays without waiting for them.
    """
    jax.block_until_ready(work())
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        last = [work() for _ in range(calls)][-1]
        jax.block_until_ready(last)
        found.append((time.perf_counter() - begin) / calls)
    return statistics.median(found)
