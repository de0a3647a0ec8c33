"""The engine as it is served: its start, decode and prefill steps, a crowd of requests, gaps between steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu import gaps, gate
from benchmarks.gpu.driving import Driver, start
from benchmarks.gpu.parts import Work, each
from benchmarks.gpu.record import CROWD, Piece, Row
from benchmarks.gpu.sizes import Crowd, Model, Size
from jaxserve.launching import Launched


def measure(size: Size, work: Work, argument: str) -> Iterator[Row]:
    warmth = cache_state(work.folder)
    launched = start(work.folder, size.model, size.engine)
    yield Row(f"ready, {warmth}", time.time() - work.began, "s", note="from the start of Python")
    mark_complete(work.folder)
    driver = Driver(launched, size.model.vocab)
    driver.seconds(1, size.context, 4)
    yield from each(
        [
            *(partial(decode, driver, size, batch) for batch in size.batches),
            partial(crowd, driver, size),
            partial(prefill, driver, size),
            *(partial(trace, driver, size, batch, work.folder / "trace") for batch in size.batches),
            partial(_close, launched),
            partial(gate.check, launched.executor.shapes, size.model.layers),
        ]
    )


def decode(driver: Driver, size: Size, batch: int, name: str = "") -> Iterator[Row]:
    """Time a token, tokens a second, the host's own work."""
    found = driver.decode(batch, size.context, size.steps)
    least = (size.model.decoding(batch, size.context + size.steps / 2),)
    yield Row(
        f"{name}a token, batch {batch}",
        found.step * 1e3,
        "ms",
        found.step,
        least,
        f"context {size.context}, median {found.median * 1e3:.3f} ms",
    )
    yield Row(f"{name}output, batch {batch}", batch / found.step, "tokens/s")
    yield Row(f"{name}host at work, batch {batch}", found.host * 1e3, "ms/step", note="beside the device")


def trace(driver: Driver, size: Size, batch: int, folder: Path) -> Iterator[Row]:
    """Gaps of the device while it decodes. Tracing slows the host, so what is found is the most there may be."""
    steps = size.traced_steps
    driver.settle(batch, size.context, steps)
    with gaps.tracing(folder):
        for _ in range(steps):
            driver.step()
    driver.finish()
    idle = gaps.read(folder)
    if idle is not None:
        note = f"device busy {idle.busy / steps * 1e3:.3f} ms, between kernels {idle.between_kernels / steps * 1e3:.3f}"
        yield Row(f"idle between steps, batch {batch}", idle.waiting / steps * 1e3, "ms/step", note=note)


def prefill(driver: Driver, size: Size) -> Iterator[Row]:
    """One prompt on an idle engine, up to its first token."""
    taken = statistics.median(driver.seconds(1, size.prefill, 1) for _ in range(size.repeats))
    yield Row(f"prompt of {size.prefill}, alone", taken * 1e3, "ms", taken, (size.model.entering(1, size.prefill),))


def crowd(driver: Driver, size: Size) -> Iterator[Row]:
    """Requests that come all at once."""
    c = size.crowd
    taken = driver.seconds(c.clients, c.prompt, c.answer)
    note = f"{c.clients} at once, {c.prompt} / {c.answer}"
    yield Row(CROWD, c.clients * c.answer / taken, "tokens/s", taken, least_of(size.model, c), note)


def least_of(model: Model, crowd: Crowd) -> tuple[Piece, ...]:
    """Of a crowd: all prompts enter, then all answers grow together."""
    entering = model.entering(crowd.clients, crowd.prompt)
    middle = model.decoding(crowd.clients, crowd.prompt + crowd.answer / 2)
    return entering, Piece(middle.bytes, middle.flops, times=crowd.answer - 1)


def _close(launched: Launched) -> tuple[Row, ...]:
    launched.engine.close()
    return ()


def cache_state(folder: Path) -> str:
    """What the folder's compile cache holds: nothing (cold), all of it (warm), or what an unfinished start left."""
    if _complete(folder).exists():
        return "warm"
    cache = folder / "cache"
    return "cache unfinished" if cache.exists() and any(cache.iterdir()) else "cold"


def mark_complete(folder: Path) -> None:
    _complete(folder).touch()


def _complete(folder: Path) -> Path:
    return folder / "cache-complete"
