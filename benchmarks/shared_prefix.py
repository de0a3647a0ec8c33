"""Latency against load where all requests begin with the same 2,000 tokens, with and without the prefix cache.

    python -m benchmarks.shared_prefix --peers-dir ENVIRONMENTS

An assistant's long system prompt, requests that come at random (a Poisson process) whether or not earlier ones are
answered, and the 95th percentile of the time to a whole answer. The server is `jaxserve serve`, the client
`jaxserve bench serve`. Beside it transformers, one request after the other in the order in which they came: the time
of each is measured alone, and the queue before it computed, which for one request at a time is exact.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import engines, served
from benchmarks.peers.cases import SPECIAL, VOCAB
from benchmarks.peers.driver import Request, Setting, free_port
from benchmarks.peers.engines import ENGINES, OURS, Engine, Installed
from benchmarks.peers.models import Models
from benchmarks.peers.process import Driver, Held
from server.bench.arrivals import offsets

SERVICES = 4
"""Requests of the loop that are timed."""


@dataclass(frozen=True)
class Load:
    """Requests of `prefix` + `suffix` tokens with answers of `answer` tokens."""

    prefix: int
    suffix: int
    answer: int
    requests: int
    """At each rate."""
    rates: Sequence[float]
    """Requests a second."""

    @property
    def length(self) -> int:
        """Of the longest sequence, with room for texts that are not as long as they should be."""
        return self.prefix + self.suffix + self.answer + 64


def serve(load: Load, setting: Setting, installed: Installed, models: Models) -> list[dict[str, float]]:
    """What the client tells of each rate.

    Raises:
        EngineError: the server or the client fails.
    """
    tokenizer = models.hugging_face("bfloat16")
    port = free_port()
    command = served.command(_engine(OURS), installed, setting, port)
    log = models.directory / "shared_prefix.log"
    with (
        tempfile.TemporaryDirectory() as directory,
        Held(command, setting.threads, Path(setting.compiled), log) as server,
    ):
        served.until_healthy(server, port)
        client = served.Client(Path(directory), tokenizer)
        shape = {"prefix": load.prefix, "suffix": load.suffix, "output": load.answer}
        lengths = [word for name, n in shape.items() for word in (f"--prefix-repetition-{name}-len", str(n))]
        asked = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "1", *lengths]
        return [
            client.load(
                server,
                port,
                [*asked, "--num-prompts", str(load.requests), "--request-rate", str(rate), "--seed", str(i)],
            )
            for i, rate in enumerate(load.rates)
        ]


def loop(load: Load, setting: Setting, python: Path, log: Path) -> list[float]:
    """Seconds of each of some requests that transformers answers one after the other.

    Raises:
        EngineError: it fails.
    """
    rng = random.Random(0)
    common = [rng.randrange(SPECIAL, VOCAB) for _ in range(load.prefix)]
    with Driver(python, "transformers", setting, log) as driver:
        driver.start()
        found: list[float] = []
        for _ in range(SERVICES):
            request: Request = ([*common, *(rng.randrange(SPECIAL, VOCAB) for _ in range(load.suffix))], load.answer)
            found.append(driver.measure([request]).numbers["seconds"])
    return found


def queued(services: Sequence[float], arrivals: Sequence[float]) -> list[float]:
    """Seconds from each arrival to its answer, where one is served after the other. Service times come round again."""
    free, found = 0.0, list[float]()
    for i, arrival in enumerate(arrivals):
        free = max(free, arrival) + services[i % len(services)]
        found.append(free - arrival)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values, as the client's."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = ordered[int(at)]
    return low + (ordered[min(int(at) + 1, len(ordered) - 1)] - low) * (at - int(at))


def _engine(name: str) -> Engine:
    return next(engine for engine in ENGINES if engine.name == name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, help="environments of other engines; unset: without transformers")
    parser.add_argument("--models", type=Path, default=Path("build/compare"), help="where the model's formats go")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prefix", type=int, default=2000, help="tokens that all prompts begin with")
    parser.add_argument("--suffix", type=int, default=50, help="tokens after them")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=40, help="at each rate")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0], help="a second")
    given = parser.parse_args()
    load = Load(given.prefix, given.suffix, given.answer, given.requests, given.rates)
    installed = engines.find(given.peers_dir, [])
    models = Models(given.models.absolute())
    compiled = models.directory / "compiled" / "shared_prefix"
    compiled.mkdir(parents=True, exist_ok=True)

    def setting(caching: bool, variant: str = "") -> Setting:
        model = str(models.hugging_face("bfloat16"))
        return Setting(model, "bf16", variant, given.threads, 64, load.length, caching, str(compiled))

    columns = {
        "with the cache": [told["e2el_p95"] / 1e3 for told in serve(load, setting(True), installed, models)],
        "without": [told["e2el_p95"] / 1e3 for told in serve(load, setting(False), installed, models)],
    }
    if "transformers" in installed.pythons:
        log = models.directory / "transformers.log"
        services = loop(load, setting(False, "single"), installed.pythons["transformers"], log)
        columns["transformers loop"] = [
            percentile(queued(services, offsets(load.requests, rate, 1.0, i)), 0.95)
            for i, rate in enumerate(load.rates)
        ]
    print(f"p95 seconds to the whole answer; {load.requests} requests at each rate, {load.prefix} common tokens\n")
    print(f"| requests/s | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for i, rate in enumerate(load.rates):
        print(f"| {rate:g} | {' | '.join(f'{column[i]:.2f}' for column in columns.values())} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
