"""Measures how long `jaxserve serve` takes until it is ready and until its first token, and where the time goes.

Cold: with an empty directory of compiled programs; the model's files are as the operating system has them. Warm: with
the directory that a cold start has filled. Each start is a process of its own, on a free port of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import msgspec

from jaxserve.observe import timeline
from jaxserve.observe.timeline import Told
from server import flags
from server.bench import options
from server.bench.answers import Sample
from server.bench.client import Client
from server.bench.command import BenchError
from server.bench.endpoint import PATHS, Endpoint
from server.bench.offline import read_words
from server.bench.summary import percentile

POLL_SECONDS = 0.05
STOP_SECONDS = 30.0
PERCENTILES = (10, 25, 50, 75, 90, 99)
LISTENING = "listening"
"""The first stage: the interpreter, imports of the server, the socket."""
OPENING = "opening the model"
"""The first stage of the engine, with which the timeline in its log begins."""
COMMAND = (sys.executable, "-P", "-c", "import sys; from server.cli import main; sys.exit(main())", "serve")
_CHOSEN = ("--host", "--port", "--uds", "--ssl-certfile", "--compilation-cache-dir")


@dataclass(slots=True)
class Stage:
    """Seconds since the process was started. Stages may run beside one another."""

    begin: float
    end: float


@dataclass(slots=True)
class Start:
    """One start, as far as it has come; seconds since the process was started."""

    stages: dict[str, Stage] = field(default_factory=dict[str, Stage])
    ready: float = 0.0
    first_token: float = 0.0
    told: Told | None = None
    """The engine's own account, once it is ready."""

    def see(self, stage: str, at: float) -> None:
        """The server was at `stage`."""
        name = "compiling" if stage.startswith("compiling") else stage
        found = self.stages.setdefault(name, Stage(at, at))
        found.end = max(found.end, at)


class _Health(msgspec.Struct):
    stage: str = ""
    status: str = ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("starts")
    group.add_argument("--num-iters", type=options.positive, default=3, metavar="N", help="of each kind (default: 3)")
    group.add_argument("--num-iters-cold", type=options.count, metavar="N", help="cold ones, if not as many")
    group.add_argument("--num-iters-warm", type=options.count, metavar="N", help="warm ones, if not as many")
    group.add_argument(
        "--start-timeout-sec", type=options.seconds, default=1800.0, metavar="N", help="of one start (default: 1800)"
    )
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the numbers into a file")


def run(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    own, others, rest = read_words(parser, words, flags.BOTH)
    engine, server = flags.read_flags(others, rest)
    named = {word.partition("=")[0] for word in rest}
    for flag in _CHOSEN:
        if flag in named:
            parser.error(f"{flag} is what this bench chooses; remove it")
    if server.uds or server.ssl_certfile:
        parser.error("this bench asks over plain HTTP; remove uds and ssl_certfile from the configuration file")
    cold = own.num_iters if own.num_iters_cold is None else own.num_iters_cold
    warm = own.num_iters if own.num_iters_warm is None else own.num_iters_warm
    starter = Starter(rest, (engine.served_model_name or (engine.model,))[0], server.api_key, own.start_timeout_sec)
    found = measure(starter, cold, warm)
    for name, starts in found.items():
        if starts:
            print("\n".join(lines(name, starts)))
    if own.output_json is not None:
        options.write_json(own.output_json, record("cold", found["cold"]) | record("warm", found["warm"]))
    return 0


def measure(starter: Starter, cold: int, warm: int) -> dict[str, list[Start]]:
    """Cold starts, each with a directory of its own; then warm ones, with the last of these."""
    found: dict[str, list[Start]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as base:
        cache = Path(base) / "cold-0"
        for i in range(max(cold, 1)):
            cache = Path(base) / f"cold-{i}"
            cache.mkdir()
            begun = starter.start(cache)
            if i < cold:
                found["cold"].append(begun)
                _tell("cold", i, begun)
        for i in range(warm):
            found["warm"].append(starter.start(cache))
            _tell("warm", i, found["warm"][-1])
    return found


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts servers, one at a time."""

    words: Sequence[str]
    """What `jaxserve serve` is given besides."""
    model: str
    keys: Sequence[str]
    patience: float
    """Seconds."""
    command: Sequence[str] = COMMAND

    def start(self, cache: Path) -> Start:
        """From a new process to its first token, and down again.

        Raises:
            BenchError: the server ends before it is ready, or takes too long.
        """
        port = _free_port()
        given = [*self.words, "--host", "127.0.0.1", "--port", str(port), "--compilation-cache-dir", str(cache)]
        begin = time.perf_counter()
        process = subprocess.Popen(
            [*self.command, *given], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        start, told = Start(), list[str]()
        reading = threading.Thread(target=_read, args=(process.stderr, begin, start, told), daemon=True)
        reading.start()
        try:
            self._until_ready(process, port, begin, start, told)
            asyncio.run(self._first_token(port))
            start.first_token = time.perf_counter() - begin
        finally:
            _stop(process)
            reading.join()
            process.stderr.close()
        return start

    def _until_ready(
        self, process: subprocess.Popen[str], port: int, begin: float, start: Start, told: Sequence[str]
    ) -> None:
        start.see(LISTENING, 0.0)
        while True:
            if process.poll() is not None:
                raise BenchError(f"the server ended with status {process.returncode}: {told[-1] if told else ''}")
            status, stage = _health(port)
            now = time.perf_counter() - begin
            if status and start.stages[LISTENING].end == 0.0:
                start.see(LISTENING, now)
            if stage:
                start.see(stage, now)
            if status == 200:
                start.ready = now
                return
            if now > self.patience:
                raise BenchError(f"the server is not ready after {now:.0f} s; it was {stage or 'not listening'}")
            time.sleep(POLL_SECONDS)

    async def _first_token(self, port: int) -> None:
        headers = {"Authorization": f"Bearer {self.keys[0]}"} if self.keys else {}
        client = Client(f"http://127.0.0.1:{port}", headers)
        fields = {"temperature": 0, "ignore_eos": True}
        answer = await Endpoint(client, PATHS["openai"], False, self.model, fields).ask(Sample("Hello", 1, 1))
        client.close()
        if answer.error:
            raise BenchError(f"the first request fails: {answer.error}")


def lines(name: str, starts: Sequence[Start]) -> list[str]:
    """A table: when each stage began and ended, in medians."""
    ready, token = (_median(starts, what) for what in ("ready", "first_token"))
    computed = _cpu_times(starts)
    cpu = [f"{'CPU until ready (s):':<40} {statistics.median(computed):.2f}"] if computed else []
    found = [
        f"{f' {name.capitalize()} start, median of {len(starts)} ':=^50}",
        f"{'Ready (s):':<40} {ready:.2f}",
        f"{'First token (s):':<40} {token:.2f}",
        *cpu,
        f"{'--- stage':<26}{'from':>8}{'to':>8}{'s':>8}",
    ]
    for stage, (begin, end) in stages(starts).items():
        found.append(f"{stage:<26}{begin:>8.2f}{end:>8.2f}{end - begin:>8.2f}")
    return [*found, f"{'first token':<26}{ready:>8.2f}{token:>8.2f}{token - ready:>8.2f}", "=" * 50]


def stages(starts: Sequence[Start]) -> dict[str, tuple[float, float]]:
    """Medians of begin and end, in the order of the first start.

    Stages of the engine are as its log tells them. Others, and all of a server that tells none, end with the last word
    about them, or where the next one begins if that is later and nothing else runs beside them.
    """
    closed = [_closed(start) for start in starts]
    names = [name for name in closed[0] if all(name in one for one in closed)]
    return {
        name: (
            statistics.median(one[name].begin for one in closed),
            statistics.median(one[name].end for one in closed),
        )
        for name in names
    }


def _closed(start: Start) -> Mapping[str, Stage]:
    """With the gaps closed: the server says when it begins something, not when that is done."""
    order = sorted(start.stages.items(), key=lambda item: item[1].begin)
    found: dict[str, Stage] = {}
    for i, (name, stage) in enumerate(order):
        following = order[i + 1][1].begin if i + 1 < len(order) else start.ready
        found[name] = Stage(stage.begin, max(stage.end, following))
    if start.told is None or OPENING not in start.stages:
        return found
    origin = start.stages[OPENING].begin
    before = {name: stage for name, stage in found.items() if stage.begin < origin}
    phases = {phase.name: Stage(origin + phase.begin, origin + phase.end) for phase in start.told.phases}
    return before | phases


def _cpu_times(starts: Sequence[Start]) -> list[float]:
    return [start.told.cpu for start in starts if start.told is not None]


def record(name: str, starts: Sequence[Start]) -> dict[str, object]:
    """The numbers of one kind of start, under vLLM's names and some more."""
    times = [start.ready for start in starts]
    if not times:
        return {}
    return {
        f"avg_{name}_startup_time": statistics.fmean(times),
        f"median_{name}_startup_time": statistics.median(times),
        f"{name}_startup_times": times,
        f"{name}_startup_percentiles": {str(p): percentile(sorted(times), p) for p in PERCENTILES},
        f"median_{name}_first_token_time": _median(starts, "first_token"),
        f"{name}_first_token_times": [start.first_token for start in starts],
        f"{name}_cpu_times": _cpu_times(starts),
        f"{name}_stages": {stage: list(times) for stage, times in stages(starts).items()},
    }


def _median(starts: Sequence[Start], what: str) -> float:
    return statistics.median(getattr(start, what) for start in starts)


def _tell(name: str, index: int, start: Start) -> None:
    print(
        f"{name} start {index + 1}: ready {start.ready:.2f} s, first token {start.first_token:.2f} s", file=sys.stderr
    )


def _read(lines_of: TextIO, begin: float, start: Start, told: list[str]) -> None:
    """Runs in a thread: the server's progress lines, as they come, and all others."""
    for line in lines_of:
        stage = line.strip().removesuffix(" ...")
        if stage != line.strip():
            start.see(stage, time.perf_counter() - begin)
        elif stage:
            told.append(stage)
            start.told = timeline.read(stage) or start.told


def _health(port: int) -> tuple[int, str]:
    """Status and stage; zero where nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        data = response.read()
        return response.status, msgspec.json.decode(data, type=_Health).stage if data else ""
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        return 0, ""
    finally:
        connection.close()


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
