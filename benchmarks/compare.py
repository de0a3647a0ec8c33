"""jaxserve beside every other engine found installed, on the same machine, in turns; writes the table of ratios.

    python -m benchmarks.compare --peers-dir ENVIRONMENTS

Engines: vLLM, llama.cpp, OpenVINO GenAI, transformers, each with an environment of its own below ENVIRONMENTS
(benchmarks/peers/README.md says how to make them). All answer greedily, as many tokens as the workload says, at the
same precision, with the same threads and the same number of sequences together. A process of each engine is kept and
stopped while others have their turn; each turn has other tokens, so that nothing of the last one is cached. Every
measurement is appended to --results; --resume goes on where a run was broken off. `peers/cases.py` lists the cases.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from benchmarks.peers import engines, served, table
from benchmarks.peers.cases import CASES, LENGTH, SEQUENCES, Case, Speeds, cut, floor_rate, read_workload, shifted
from benchmarks.peers.driver import Request, Setting, free_port
from benchmarks.peers.engines import ENGINES, PACKAGES, Engine, Installed
from benchmarks.peers.models import Models
from benchmarks.peers.process import Driver, EngineError, Held, environment
from benchmarks.peers.table import Record

HERE = Path(__file__).parent
PROBES = {"jaxserve": "jax", "transformers": "torch"}
"""Which library of which environment is asked how fast the machine is."""
QUICK = (4, 8)
"""Requests, and tokens of an answer."""


@dataclass
class Comparison:
    """One call of this program."""

    installed: Installed
    engines: Sequence[Engine]
    models: Models
    results: Path
    runs: int
    threads: int
    quick: bool
    records: list[Record]
    failures: list[str] = field(default_factory=list[str])

    def measure(self, cases: Sequence[Case]) -> None:
        """Every case in turns; cases that the same processes can answer, together."""
        measures = {"offline": self._offline, "http": self._http, "start": self._start}
        for (kind, _, _), group in groupby(cases, lambda case: (case.kind, case.precision, case.caching)):
            measures[kind](list(group))

    def requests(self, case: Case, engine: Engine) -> list[Request]:
        """Those of its workload that this engine gets."""
        found = read_workload(case.workload)
        found = found[: engine.some.get(case.workload, len(found))]
        return cut(found, *QUICK) if self.quick else found

    def _offline(self, cases: Sequence[Case]) -> None:
        with ExitStack() as stack:
            drivers: dict[str, Driver] = {}
            for engine in self._to_do(cases):
                with self._noting(cases[0], engine):
                    setting = self._setting(engine, cases[0], self._compiled(engine))
                    driver = stack.enter_context(self._driver(engine, setting))
                    with driver.turn():
                        driver.start()
                    drivers[engine.name] = driver
            for run in range(self.runs):
                for case in cases:
                    for engine in self._turns(case, run):
                        if engine.name in drivers:
                            requests = shifted(self.requests(case, engine), run)
                            with self._noting(case, engine):
                                measured = drivers[engine.name].measure(requests)
                                first = [tokens[0] for tokens in measured.answers]
                                self._note(case, engine, run, len(requests), measured.numbers, first)

    def _http(self, cases: Sequence[Case]) -> None:
        directory = self.models.hugging_face("bfloat16")
        with ExitStack() as stack:
            client = served.Client(Path(stack.enter_context(tempfile.TemporaryDirectory())), directory)
            servers: dict[str, tuple[Held, int]] = {}
            for engine in self._to_do(cases):
                with self._noting(cases[0], engine):
                    port = free_port()
                    setting = self._setting(engine, cases[0], self._compiled(engine))
                    command = served.command(engine, self.installed, setting, port)
                    server = stack.enter_context(Held(command, self.threads, Path(setting.compiled), self._log(engine)))
                    with server.turn():
                        served.until_healthy(server, port)
                    servers[engine.name] = server, port
            for run in range(self.runs):
                for turn, case in enumerate(cases, start=run * len(cases)):
                    for engine in self._turns(case, run):
                        if engine.name in servers:
                            requests = shifted(self.requests(case, engine), turn)
                            with self._noting(case, engine), servers[engine.name][0].turn():
                                measured = client.texts(*servers[engine.name], requests, case.concurrency)
                                self._note(case, engine, run, len(requests), measured)

    def _start(self, cases: Sequence[Case]) -> None:
        """First one with nothing compiled, where the engine compiles, then others with what that has left."""
        for run in range(self.runs):
            for case in cases:
                for engine in self._turns(case, run):
                    with self._noting(case, engine):
                        compiled = self._compiled(engine).with_name(f"start-{engine.kind}")
                        cold = engine.compiles and (run == 0 or not compiled.exists())
                        if cold:
                            shutil.rmtree(compiled, ignore_errors=True)
                        setting = self._setting(engine, case, compiled)
                        measured: dict[str, float] = {}
                        for name in ("cold", "warm") if cold else ("warm",):
                            with self._driver(engine, setting) as driver:
                                measured[name] = driver.start()
                        self._note(case, engine, run, 1, measured)

    def _to_do(self, cases: Sequence[Case]) -> list[Engine]:
        """Engines that any of these cases still wants."""
        return [
            e for e in self.engines if any(self._wanted(case, e, run) for case in cases for run in range(self.runs))
        ]

    def _turns(self, case: Case, run: int) -> list[Engine]:
        """Those that the case wants in this run, another one first each time."""
        wanted = [engine for engine in self.engines if self._wanted(case, engine, run)]
        first = run % max(len(wanted), 1)
        return wanted[first:] + wanted[:first]

    def _wanted(self, case: Case, engine: Engine, run: int) -> bool:
        """The engine has a part in it, and was not measured yet."""
        done = any((r.case, r.engine, r.run) == (case.name, engine.name, run) for r in self.records)
        return not done and not engine.barred(case)

    def _setting(self, engine: Engine, case: Case, compiled: Path) -> Setting:
        compiled.mkdir(parents=True, exist_ok=True)
        return Setting(
            model=str(engines.model(engine, case.precision, self.models, self.installed)),
            precision=case.precision,
            variant=engine.variant,
            threads=self.threads,
            sequences=SEQUENCES,
            length=LENGTH,
            caching=case.caching,
            compiled=str(compiled),
        )

    def _driver(self, engine: Engine, setting: Setting) -> Driver:
        return Driver(self.installed.pythons[engine.kind], engine.kind, setting, self._log(engine))

    def _compiled(self, engine: Engine) -> Path:
        return self.models.directory / "compiled" / engine.kind

    def _log(self, engine: Engine) -> Path:
        return self.models.directory / f"{engine.kind}.log"

    def _note(
        self,
        case: Case,
        engine: Engine,
        run: int,
        requests: int,
        measured: Mapping[str, float],
        first: Sequence[int] = (),
    ) -> None:
        version = self.installed.versions[engine.kind]
        record = Record(case.name, engine.name, run, version, _now(), requests, measured, list(first))
        table.append(self.results, record)
        self.records.append(record)
        shown = ", ".join(f"{name} {value:.2f}" for name, value in measured.items())
        print(f"{case.name:14s} {engine.name:28s} turn {run + 1}: {shown}", flush=True)

    @contextlib.contextmanager
    def _noting(self, case: Case, engine: Engine) -> Iterator[None]:
        """What an engine cannot do stops no other; it is told at the end."""
        try:
            yield
        except (EngineError, subprocess.CalledProcessError) as error:
            self.failures.append(f"{case.name}, {engine.name}: {error}")
            print(self.failures[-1], file=sys.stderr, flush=True)


def probe(installed: Installed, threads: int, weights: int, compiled: Path) -> Speeds:
    """The best that any of the libraries does. `weights`: bytes, as many are read."""
    found: dict[str, float] = {}
    for kind, library in PROBES.items():
        if kind in installed.pythons:
            command = [installed.pythons[kind], "-m", "benchmarks.peers.probe", library, str(threads), str(weights)]
            told = subprocess.run(command, env=environment(threads, compiled), stdout=subprocess.PIPE, check=True)
            found = {
                name: max(value, found.get(name, 0.0)) for name, value in {**found, **json.loads(told.stdout)}.items()
            }
    return Speeds(found.pop("bandwidth"), found)


def machine() -> str:
    """Processor, cores and memory, as Linux tells them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = [flag for flag in told.get("flags", "").split() if flag in ("avx2", "avx512_bf16", "amx_bf16", "amx_int8")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = told.get("model name", "unknown processor")
    return f"{name} ({', '.join(flags)}), {os.cpu_count()} cores, {memory:.0f} GiB"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")


def _introduction(records: Sequence[Record], speeds: Speeds, threads: int) -> list[str]:
    """What stands above the tables."""
    days = sorted({record.date[:10] for record in records})
    versions = dict.fromkeys(record.version for record in records)
    products = ", ".join(f"{name} {value / 1e9:.0f} GFLOP/s" for name, value in speeds.products.items())
    taken = " and ".join(dict.fromkeys((days[0], days[-1])))
    return [
        f"Taken on {taken}: {machine()}, {threads} threads for each engine. {'; '.join(versions)}.",
        "`benchmarks/compare.py`, in turns: greedy, end of text ignored, the demo model in one precision, the same "
        "number of sequences together. CPU seconds are those of all processes of an engine. Same first token: the "
        "share of answers that begin as jaxserve's do; of tokens nearly as likely, rounding chooses. A floor is what "
        f"the machine allows at most: weights are read at {speeds.bandwidth / 1e9:.1f} GB/s, products computed at "
        f"{products} (measured in the same run). Ratios above 1 are in favour of jaxserve.",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--peers-dir", type=Path, help="environments of the other engines, one below each kind's name")
    parser.add_argument("--peer", action="append", default=[], metavar="KIND=PYTHON", help="an environment elsewhere")
    parser.add_argument("--engines", nargs="+", choices=[engine.name for engine in ENGINES], help="default: all found")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"of {', '.join(names)}")
    parser.add_argument("--runs", type=int, default=3, help="turns of each engine on each case")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="a few short requests: to see that all engines run")
    parser.add_argument("--models", type=Path, default=Path("build/compare"), help="where the formats of the model go")
    parser.add_argument("--results", type=Path, default=HERE / "data" / "compare.jsonl")
    parser.add_argument("--resume", action="store_true", help="measure only what --results does not have yet")
    parser.add_argument(
        "--write", type=Path, metavar="DOCUMENT", help="put the tables into it, such as docs/performance.md"
    )
    given = parser.parse_args()
    if given.results.exists() and not given.resume:
        parser.error(f"{given.results} exists; --resume goes on with it, --results names another file")
    try:
        installed = engines.find(given.peers_dir, given.peer)
    except ValueError as error:
        parser.error(str(error))
    chosen = [engine for engine in ENGINES if engine.kind in installed.pythons]
    chosen = [engine for engine in chosen if given.engines is None or engine.name in given.engines]
    for kind in sorted(PACKAGES.keys() - installed.pythons.keys()):
        print(f"not compared: {kind}, as no environment with {PACKAGES[kind]} is found", file=sys.stderr, flush=True)
    cases = [case for case in CASES if (case.name in given.only if given.only else case.usual)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no engine is left behind
    models = Models(given.models.absolute())
    sizes = models.sizes()
    speeds = probe(installed, given.threads, 2 * (sizes.body + sizes.head), models.directory)
    comparison = Comparison(
        installed, chosen, models, given.results, given.runs, given.threads, given.quick, table.read(given.results)
    )
    comparison.measure(cases)
    floors = {
        case.name: rate
        for case in CASES
        if (rate := floor_rate(case, comparison.requests(case, ENGINES[0]), sizes, speeds)) is not None
    }
    introduction = _introduction(comparison.records, speeds, given.threads)
    told = table.section(CASES, chosen, comparison.records, floors, introduction)
    print(told)
    if given.write:
        given.write.write_text(table.place(given.write.read_text(), told))
    for failure in comparison.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    sys.exit(main())
