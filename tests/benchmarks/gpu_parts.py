"""Parts of a benchmark that end in every way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.parts import Skip, Work, each
from benchmarks.gpu.record import Row
from benchmarks.gpu.sizes import Size


def measure(size: Size, work: Work, argument: str) -> Iterator[Row]:
    if argument == "nothing":
        raise Skip("there is nothing to measure")
    yield from each([partial(_one, argument), lambda: [Row("last", 2.0, "s", note=size.name)]])


def _one(argument: str) -> Iterator[Row]:
    yield Row("first", 1.0, "ms")
    if argument == "slow":
        time.sleep(600)
    if argument == "wrong":
        raise ValueError("it cannot be measured")
