"""What a step costs the host, beside ever more that is idle: it must follow the work in the step, and nothing else.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --device smollm2-135m-instruct

Each case is measured at three sizes, with the same rows decoding: calls of functions in a step, which are exact, and
the CPU time of the engine's thread, which also knows what a call into C hides. The device is a stand-in that computes
nothing; `--device` measures the real one beside it, with a model, where the size is one of the device's too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import numpy as np

import jaxserve
from jaxserve.config import EngineConfig
from jaxserve.engine import Bounds, Engine
from jaxserve.host.scheduler import Limits, Scheduler
from jaxserve.host.text import TokenStream
from jaxserve.observe.log_line import LogLine
from jaxserve.observe.metrics import Metrics
from jaxserve.plan import Choice, StepPlan, StepResult
from jaxserve.types import OutputKind, Request, SamplingParams

PAGE = 16
DECODING = 8
"""Sequences that each get a token in every step that is measured."""
STEPS = 4 * PAGE
"""Steps that are measured: each sequence begins a page as often as any other."""
LONG = 100_000
"""Tokens of answers that do not end while something is measured."""


class StandIn:
    """An `Executor` and its `Flight`s: every token is 0."""

    def launch(self, plan: StepPlan) -> Done:
        return Done(plan.emitting)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Done:
    emitting: int

    def sample(self, choice: Choice | None = None) -> None:
        pass

    def read(self) -> StepResult:
        return StepResult(np.zeros(self.emitting, np.int32), None, {})


class Words:
    """A `Vocabulary` and its `TokenStream`s: every token is a word."""

    def stream(self, *, skip_special_tokens: bool, prompt: Sequence[int]) -> TokenStream:
        return self

    def step(self, token: int) -> str | None:
        return "word "

    def flush(self) -> str:
        return ""

    def token_text(self, token: int) -> str:
        return "word "

    def token_bytes(self, token: int) -> bytes:
        return b"word "

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0 for _ in text.split()]


class World:
    """An engine, and requests for it."""

    def __init__(self, *, rows: int = DECODING, pages: int = 200_000, tokens: int = 8192) -> None:
        scheduler = Scheduler(Limits(rows, tokens, PAGE, (pages,), (None,)))
        bounds = Bounds(2 * LONG, 2**31, 0, (), priorities=False, seed=0, max_bad_tokens=0, max_banned=0)
        self.engine = Engine(scheduler, StandIn(), Words(), bounds, observers=(Metrics("none"), LogLine()))
        self._names = 0

    def add(self, prompt: tuple[int, ...], answer: int = LONG) -> None:
        self._names += 1
        params = SamplingParams(temperature=0, max_tokens=answer, output_kind=OutputKind.DELTA)
        self.engine.add(Request(str(self._names), prompt, params))

    def decode(self, count: int = DECODING, prompt: int = PAGE) -> World:
        """So many sequences more have come to where they only decode."""
        before = len(self.engine.scheduler.running)
        for i in range(count):
            self.add((self._names, i) * (prompt // 2))
        while len(self.engine.scheduler.running) < before + count or self._reads_prompts():
            self.engine.step()
        return self

    def run(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def _reads_prompts(self) -> bool:
        return any(s.wanted > 1 or s.generated < 1 for s in self.engine.scheduler.running)


# -- what is idle, by its amount --------------------------------------------------------------------------------


def idle_rows(size: int) -> World:
    return World(rows=DECODING + size).decode()


def pool_pages(size: int) -> World:
    return World(pages=size).decode()


def waiting(size: int) -> World:
    world = World().decode()
    for i in range(size):
        world.add((1, i))
    return world


def cached_pages(size: int) -> World:
    """Prompts of 256 pages that nobody needs any more."""
    world = World(pages=size + 2000)
    for i in range(size // 256 + 1):
        world.add((i,) * (256 * PAGE), answer=1)
        if i % 64 == 0:
            world.run()
    world.run()
    if world.engine.scheduler.pools[0].cached < size // 256 * 256:
        raise RuntimeError("the pages are not cached")
    return world.decode()


def finished(size: int) -> World:
    world = World()
    for i in range(size):
        world.add((1, i), answer=2)
        if i % 100 == 0:
            world.run()
    world.run()
    return world.decode()


def context_of_others(size: int) -> World:
    """All but one have contexts of this length."""
    return World().decode(1).decode(DECODING - 1, size)


@dataclass(frozen=True)
class Case:
    what: str
    at: Callable[[int], World]
    sizes: tuple[int, int, int]


CASES = (
    Case("idle rows", idle_rows, (8, 256, 8192)),
    Case("pages in the pool", pool_pages, (1_000, 30_000, 1_000_000)),
    Case("requests waiting", waiting, (10, 1_000, 10_000)),
    Case("cached pages", cached_pages, (1_000, 30_000, 1_000_000)),
    Case("requests finished", finished, (10, 1_000, 30_000)),
    Case("context of the others", context_of_others, (100, 3_000, 90_000)),
)


@dataclass(frozen=True)
class Cost:
    calls: float
    """Calls of functions in Python and C, a step."""
    micros: float
    """CPU time of a step."""


def cost(world: World) -> Cost:
    """Of a step, over `STEPS` of them."""
    for _ in range(PAGE):
        world.engine.step()
    calls = calls_of(lambda: [world.engine.step() for _ in range(STEPS)]) / STEPS
    seconds = [_cpu_of(world.engine.step) for _ in range(4 * STEPS)]
    return Cost(calls, 1e6 * statistics.median(seconds))


def calls_of(action: Callable[[], object]) -> int:
    """Calls of functions, in Python or C, while `action` runs."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def _cpu_of(action: Callable[[], object]) -> float:
    began = time.thread_time()
    action()
    return time.thread_time() - began


# -- the device's half ------------------------------------------------------------------------------------------

DEVICE_SIZES = {
    "pages in the pool": (600, 1_200, 4_800),
    "idle rows": (8, 56, 248),
    "context of the others": (64, 512, 2048),
}


def device_milliseconds(model: str, what: str, size: int) -> float:
    """Median wall time of a step with a model."""
    rows = DECODING + (size if what == "idle rows" else 0)
    pages = size if what == "pages in the pool" else 1_200
    config = EngineConfig(model=model, max_num_seqs=rows, num_pages=pages, max_num_batched_tokens=256, seed=0)
    engine = jaxserve.launch(config).engine
    length = size if what == "context of the others" else 64
    for i in range(DECODING):
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=OutputKind.DELTA)
        engine.add(Request(str(i), (i + 1,) * (length if i else 64), params))
    while any(s.wanted > 1 for s in engine.scheduler.running) or len(engine.scheduler.running) < DECODING:
        engine.step()
    seconds: list[float] = []
    for _ in range(40):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    engine.close()
    return 1000 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step costs beside ever more that is idle.")
    parser.add_argument("--device", metavar="MODEL", help="measure the device's half with this model too")
    args = parser.parse_args()
    print(f"host, {DECODING} sequences decoding: calls and CPU time of a step\n")
    for case in CASES:
        costs = [cost(case.at(size)) for size in case.sizes]
        cells = [f"{size:>9,d}: {c.calls:6.1f} {c.micros:6.1f} us" for size, c in zip(case.sizes, costs, strict=True)]
        print(f"{case.what:22s} {'   '.join(cells)}   x{costs[-1].micros / costs[0].micros:.2f}", flush=True)
    if args.device is None:
        return
    print(f"\nhost and device, {args.device}, {DECODING} sequences decoding: wall time of a step\n")
    for what, sizes in DEVICE_SIZES.items():
        found = [device_milliseconds(args.device, what, size) for size in sizes]
        cells = [f"{size:>9,d}: {ms:8.1f} ms" for size, ms in zip(sizes, found, strict=True)]
        print(f"{what:22s} {'   '.join(cells)}   x{found[-1] / found[0]:.2f}", flush=True)


if __name__ == "__main__":
    main()
