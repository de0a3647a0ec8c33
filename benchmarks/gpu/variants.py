"""The real engine with other compiler options: decode steps, and what starting it takes without a cache."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.driving import Driver, start
from benchmarks.gpu.parts import VARIANTS, Work
from benchmarks.gpu.record import Row
from benchmarks.gpu.serving import decode
from benchmarks.gpu.sizes import Size


def measure(size: Size, work: Work, argument: str) -> Iterator[Row]:
    options = VARIANTS[argument]
    own = {"compiler_options": options} if options else {}
    with tempfile.TemporaryDirectory(prefix="variant-", dir=work.folder) as folder:
        launched = start(Path(folder), size.model, {**size.variant_engine, **own})
        yield Row(f"{argument}: ready", time.time() - work.began, "s", note=json.dumps(options) if options else "")
        driver = Driver(launched, size.model.vocab)
        driver.seconds(1, size.context, 4)
        for batch in size.variant_batches:
            yield from decode(driver, size, batch, f"{argument}: ")
        launched.engine.close()
