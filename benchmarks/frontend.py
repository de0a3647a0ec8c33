"""The front door: what a streamed token costs the host at many concurrent streams, over a device that computes nothing.

    python benchmarks/frontend.py

All but the device is what `jaxserve serve` runs: scheduler, engine, detokeniser, event loop, app, HTTP. First one more
ring at a time in this process, so that the differences are what the rings cost: the engine alone, its streams in an
event loop, the app without sockets. Then a server in a process of its own, and clients in others, which count events.
The device takes a set time for a step: the rate that is offered is one token a stream and step. Where the loop falls
behind, tokens share an event; `tokens/event` tells.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import uvloop
from starlette.types import ASGIApp, Message

from jaxserve.async_engine import AsyncEngine
from jaxserve.config import DEMO_MODEL, EngineConfig, ServerConfig
from jaxserve.engine import Bounds, Engine
from jaxserve.grammar.compile import Grammar
from jaxserve.host.scheduler import Limits, Scheduler
from jaxserve.observe.metrics import Metrics
from jaxserve.plan import Choice, StepPlan, StepResult
from jaxserve.tokenizer import Tokenizer
from jaxserve.types import Observer, OutputKind, Request, RequestOutput, SamplingParams, StructuredOutputsParams
from jaxserve.weights.source import resolve_tokenizer
from server.app import build_app
from server.bench.client import Client, ClientError
from server.service import Service
from server.serving import Started, keep_loaded, serve

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
SAID = (
    "The lighthouse keeper counted the ships that passed in the night, wrote their names in a book with a blue cover, "
    "and told nobody - not even the cat - which of them he would have liked to follow: “Ελλάς”, perhaps, or the Åse.\n"
)
"""What every stream says, over and over; some characters are several tokens."""
PROMPT = "Once upon a time there was"
PAGE = 16
TICK = 0.002
"""Seconds between two looks at the event loop's lag."""
ENGINE, LOOP = "jaxserve-engine", "MainThread"
"""Threads of the server."""

type AsyncWork = Coroutine[object, object, int]


@dataclass(frozen=True)
class Load:
    """Who asks for what."""

    streams: int
    tokens: int
    """Of each answer."""
    step: float
    """Seconds that the device takes; 0.0: as fast as the host can."""
    clients: int = 1
    """Processes."""

    @property
    def all_tokens(self) -> int:
        return self.streams * self.tokens


class Device:
    """An `Executor` that says the tokens of a text in turn, a step each, the same in every row."""

    def __init__(self, text: Sequence[int], seconds: float) -> None:
        self._text = text
        self._seconds = seconds
        self._free = 0.0
        """When the steps launched so far are done."""

    def launch(self, plan: StepPlan) -> Flight:
        self._free = max(self._free, time.monotonic()) + self._seconds
        return Flight(self._text[plan.number % len(self._text)], plan.emitting, self._free)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Flight:
    token: int
    emitting: int
    done: float

    def sample(self, choice: Choice | None = None) -> None:
        pass

    def read(self) -> StepResult:
        left = self.done - time.monotonic()
        if left > 0:
            time.sleep(left)
        return StepResult(np.full(self.emitting, self.token, np.int32), None, {})


class NoGrammars:
    def submit(self, asked: StructuredOutputsParams) -> Future[Grammar]:
        raise NotImplementedError


@dataclass(frozen=True)
class Served:
    """All that an `AsyncEngine` is made of."""

    engine: Engine
    tokenizer: Tokenizer
    grammars: NoGrammars = field(default_factory=NoGrammars)
    default_params: Mapping[str, object] = field(default_factory=dict[str, object])


def served(model: str, load: Load, observers: Sequence[Observer] = ()) -> Served:
    """An engine with a row for each stream."""
    tokenizer = Tokenizer.load(resolve_tokenizer(model))
    length = 256 + load.tokens
    pages = load.streams * -(-length // PAGE) + 2
    scheduler = Scheduler(Limits(load.streams, max(2048, 2 * load.streams), PAGE, (pages + pages // 50,), (None,)))
    bounds = Bounds(length, tokenizer.vocab_size, 0, (), priorities=False, seed=0, max_bad_tokens=0, max_banned=0)
    device = Device(tokenizer.encode(SAID, False), load.step)
    return Served(Engine(scheduler, device, tokenizer, bounds, observers=observers), tokenizer)


# -- one more ring at a time ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """CPU of one ring and all within it."""

    what: str
    micros: float
    """Microseconds a token."""
    pieces: int
    """Outputs or events that the tokens came in."""


class Timed:
    """Sums the CPU time of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__[**P, T](self, call: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def engine_alone(model: str, load: Load) -> list[Cost]:
    """Plan, commit, and then all: the rest are text, outputs and metrics."""
    engine = served(model, replace(load, step=0.0), [Metrics("fake")]).engine
    plan, commit = Timed(), Timed()
    engine.scheduler.plan = plan(engine.scheduler.plan)
    engine.scheduler.commit = commit(engine.scheduler.commit)
    params = SamplingParams(temperature=0, max_tokens=load.tokens, output_kind=OutputKind.DELTA)
    for i in range(load.streams):
        engine.add(Request(str(i), (7,) * 8, params))
    began, pieces = time.process_time(), 0
    while engine.busy:
        pieces += len(engine.step())
    whole = time.process_time() - began
    engine.close()
    parts = {"scheduler: plan": plan.seconds, "scheduler: commit": commit.seconds, "engine": whole}
    return [Cost(name, 1e6 * seconds / load.all_tokens, pieces) for name, seconds in parts.items()]


def streams_alone(model: str, load: Load) -> Cost:
    """The engine in its thread, and a task for each stream that takes its outputs."""
    engine = AsyncEngine(served(model, load, [Metrics("fake")]))
    params = SamplingParams(temperature=0, max_tokens=load.tokens, output_kind=OutputKind.DELTA)

    async def read(i: int) -> int:
        pieces = 0
        async for _ in engine.generate((7,) * 8, params, str(i)):
            pieces += 1
        return pieces

    return _measured("streams", load, lambda: _all(load, read), engine)


def app_alone(model: str, load: Load, path: str) -> Cost:
    """The app as an ASGI server calls it; what it sends is counted and dropped."""
    engine = AsyncEngine(served(model, load, [Metrics("fake")]))
    service = Service(EngineConfig(), ServerConfig())
    service.engine = engine
    app = build_app(service, Metrics("fake").registry())
    return _measured(f"app, {path}", load, lambda: _all(load, lambda _: _call(app, path, load)), engine)


async def _call(app: ASGIApp, path: str, load: Load) -> int:
    messages: list[Message] = [{"type": "http.request", "body": request_body(path, load), "more_body": False}]
    events = 0

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Future[Message]()

    async def send(message: Message) -> None:
        nonlocal events
        events += message.get("body", b"").count(b"\n\n")

    headers = [(b"content-type", b"application/json")]
    await app({"type": "http", "method": "POST", "path": PATHS[path], "headers": headers}, receive, send)
    return events


async def _all(load: Load, one: Callable[[int], AsyncWork]) -> int:
    return sum(await asyncio.gather(*(one(i) for i in range(load.streams))))


def _measured(what: str, load: Load, work: Callable[[], AsyncWork], engine: AsyncEngine) -> Cost:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        began = time.process_time()
        pieces = runner.run(work())
        seconds = time.process_time() - began
    engine.close()
    return Cost(what, 1e6 * seconds / load.all_tokens, pieces)


def request_body(path: str, load: Load) -> bytes:
    asked = {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    return msgspec.json.encode({**asked, "max_tokens": load.tokens, "temperature": 0, "stream": True})


# -- a server and its clients ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A server at one moment."""

    cpu: Mapping[str, float]
    """Seconds of CPU by thread since the start."""
    lags: Sequence[float]
    """Seconds that the loop woke up too late, since the state before."""
    frozen: int
    """Objects that the garbage collector does not look at any more."""


@dataclass(frozen=True)
class Crowd:
    """What one process of clients saw. Times are of the system-wide monotonic clock."""

    events: int
    first: float
    last: float
    cpu: float


@dataclass(frozen=True)
class Outcome:
    """A load that was served."""

    path: str
    load: Load
    seconds: float
    events: int
    engine: float
    """CPU seconds of the engine's thread."""
    loop: float
    """CPU seconds of the event loop's."""
    client: float
    """CPU seconds of all clients."""
    lags: Sequence[float]
    frozen: int

    def micros(self, seconds: float) -> float:
        """Of each token."""
        return 1e6 * seconds / self.load.all_tokens

    def row(self) -> str:
        lags = sorted(1000 * lag for lag in self.lags)
        at = [lags[min(len(lags) - 1, int(share * len(lags)))] for share in (0.5, 0.99, 1)]
        offered = f"{self.load.streams / self.load.step:,.0f}" if self.load.step else "no limit"
        server = self.micros(self.engine + self.loop)
        return (
            f"{self.path:12s} {offered:>9s} {self.load.all_tokens / self.seconds:9,.0f} "
            f"{self.load.all_tokens / self.events:12.2f} {self.micros(self.engine):7.1f} {self.micros(self.loop):6.1f} "
            f"{self.micros(self.client):7.1f} {1e6 / server:16,.0f}   " + " ".join(f"{lag:6.1f}" for lag in at)
        )


HEAD = (
    f"{'':12s} {'tokens/s':>19s}              {'CPU, us/token':>22s} {'tokens/s of':>16s}   {'loop lag, ms':>20s}\n"
    f"{'':12s} {'offered':>9s} {'served':>9s} {'tokens/event':>12s} {'engine':>7s} {'loop':>6s} {'client':>7s} "
    f"{'a core':>16s}   {'p50':>6s} {'p99':>6s} {'max':>6s}"
)


class Watched(AsyncEngine):
    """Knows how late its event loop is."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        self.lags: list[float] = []
        self._watch: asyncio.Task[None] | None = None

    def generate(self, *args: object, **kwargs: object) -> AsyncGenerator[RequestOutput]:
        if self._watch is None:
            self._watch = asyncio.create_task(self._look())
        return super().generate(*args, **kwargs)  # type: ignore[arg-type]

    async def _look(self) -> None:
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            self.lags.append(max(0.0, time.perf_counter() - due))

    def state(self) -> State:
        clocks = {t.name: time.pthread_getcpuclockid(t.ident) for t in threading.enumerate() if t.ident is not None}
        lags, self.lags = self.lags, []
        return State({name: time.clock_gettime(clock) for name, clock in clocks.items()}, lags, gc.get_freeze_count())


def _serve(model: str, load: Load, port: int, pipe: Connection) -> None:
    """A server in this process, which tells its state through `pipe` whenever something comes from there."""

    def start(
        config: EngineConfig, *, progress: Callable[[str, float], None], observers: Sequence[Observer]
    ) -> Started:
        engine = Watched(served(model, load, observers))
        threading.Thread(target=_tell, args=(engine, pipe), daemon=True).start()
        return Started(engine, config)

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    serve(
        EngineConfig(), ServerConfig(host="127.0.0.1", port=port, shutdown_timeout=1.0, disable_log_stats=True), start
    )


def _tell(engine: Watched, pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send(engine.state())


def _ask(url: str, path: str, load: Load, streams: int) -> Crowd:
    """Clients in this process, each with a connection; all ask at once."""
    began = time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(_ask_all(url, path, load, streams))
    return replace(found, cpu=time.process_time() - began)


async def _ask_all(url: str, path: str, load: Load, streams: int) -> Crowd:
    client = Client(url, {})
    times: list[float] = []
    events = ended = 0

    def take(piece: bytes) -> None:
        nonlocal events, ended
        events += piece.count(b"\n\n")
        ended += piece.endswith(b"data: [DONE]\n\n")

    async def one() -> None:
        reply = await client.post(PATHS[path], request_body(path, load), take)
        times.append(time.monotonic())
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.body[:500]!r}")

    first = time.monotonic()
    await asyncio.gather(*(one() for _ in range(streams)))
    client.close()
    if ended != streams:
        raise RuntimeError(f"{streams - ended} of {streams} streams broke off")
    return Crowd(events, first, max(times), 0.0)


def over_http(model: str, path: str, load: Load) -> Outcome:
    """A server and its clients, each in processes of their own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    port = _free_port()
    server = context.Process(target=_serve, args=(model, load, port, theirs))
    server.start()
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(_until_ready(url))
        with ProcessPoolExecutor(load.clients, mp_context=context) as pool:
            one = partial(_ask, url, path)
            each = [load.streams // load.clients] * load.clients
            list(pool.map(one, [replace(load, tokens=8)] * load.clients, each))
            before = _state(ours)
            crowds = list(pool.map(one, [load] * load.clients, each))
            after = _state(ours)
    finally:
        server.terminate()
        server.join()
    return Outcome(
        path,
        load,
        max(crowd.last for crowd in crowds) - min(crowd.first for crowd in crowds),
        sum(crowd.events for crowd in crowds),
        after.cpu[ENGINE] - before.cpu[ENGINE],
        after.cpu[LOOP] - before.cpu[LOOP],
        sum(crowd.cpu for crowd in crowds),
        after.lags,
        after.frozen,
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def _state(pipe: Connection) -> State:
    pipe.send(None)
    return pipe.recv()


async def _until_ready(url: str) -> None:
    client = Client(url, {})
    for _ in range(600):
        with contextlib.suppress(ClientError):
            if (await client.get("/health")).status == 200:
                break
        await asyncio.sleep(0.1)
    else:
        raise RuntimeError("the server does not become ready")
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="What a streamed token costs the host.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1000, help="of each answer")
    parser.add_argument("--rates", type=float, nargs="+", default=[10_000, 25_000, 50_000], help="tokens/s offered")
    parser.add_argument("--clients", type=int, default=1, help="processes of clients")
    parser.add_argument("--model", default=DEMO_MODEL, help="whose tokenizer and chat template are used")
    parser.add_argument("--rings", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--http", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    if args.streams % args.clients:
        parser.error(f"--streams {args.streams} must be a multiple of --clients {args.clients}")
    loads = [Load(args.streams, args.tokens, args.streams / rate, args.clients) for rate in args.rates]
    print(f"{args.streams} streams of {args.tokens} tokens\n")
    if args.rings:
        keep_loaded()
        print(f"one ring after the other, {args.rates[0]:,.0f} tokens/s offered: CPU, us/token (tokens in a piece)")
        costs = [*engine_alone(args.model, loads[0]), streams_alone(args.model, loads[0])]
        costs += [app_alone(args.model, loads[0], path) for path in PATHS]
        for cost in costs:
            print(f"  {cost.what:24s} {cost.micros:6.1f}  ({loads[0].all_tokens / cost.pieces:.2f})", flush=True)
    if args.http:
        print(f"\n{HEAD}")
        for path in PATHS:
            for load in loads:
                print(over_http(args.model, path, load).row(), flush=True)


if __name__ == "__main__":
    main()
