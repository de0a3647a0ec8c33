"""The start of the engine that is served, once more: its programs come from the compile cache."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.gpu.driving import start
from benchmarks.gpu.parts import Skip, Work
from benchmarks.gpu.record import Row
from benchmarks.gpu.serving import cache_state
from benchmarks.gpu.sizes import Size


def measure(size: Size, work: Work, argument: str) -> Iterator[Row]:
    if cache_state(work.folder) != "warm":
        raise Skip("no engine has filled the compile cache yet")
    launched = start(work.folder, size.model, size.engine)
    yield Row("ready, warm", time.time() - work.began, "s", note="from the start of Python")
    launched.engine.close()
