"""`jaxserve serve`: binds the port, answers at once, loads the engine beside, and goes down in order.

The engine, and jax with it, is imported in the loading thread, after the socket listens.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import shutil
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import uvicorn

import jaxserve
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.observe.log_line import LogLine
from jaxserve.observe.metrics import Metrics
from jaxserve.types import Observer
from server.app import build_app
from server.service import Engine, Service
from server.terminal import LoadingLine, LogAbove

log = logging.getLogger("jaxserve.server")

LOG_SECONDS = 10.0
WATCH_SECONDS = 0.5
GRACE_SECONDS = 1.0
"""For answers that say that the end has come."""
YOUNG_OBJECTS = 50_000
"""New ones that start a collection: more than a step of many streams makes, which are gone by themselves after it."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that they close them first."""


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that is ready, and the configuration with what was left open filled in."""

    engine: Engine
    config: EngineConfig


class Start(Protocol):
    """From a configuration to an engine that is ready; takes as long as it takes."""

    def __call__(
        self, config: EngineConfig, *, progress: Callable[[str, float], None], observers: Sequence[Observer]
    ) -> Started: ...


def start_engine(
    config: EngineConfig, *, progress: Callable[[str, float], None], observers: Sequence[Observer]
) -> Started:
    """Imports the engine, by using its names for the first time, and starts it."""
    progress("importing jax", 0.0)
    launch = jaxserve.launch
    gc.freeze()  # modules stay: no collection has to look through them
    launched = launch(config, progress=progress, observers=observers)
    return Started(jaxserve.AsyncEngine(launched), launched.config)


def serve(config: EngineConfig, server: ServerConfig, start: Start = start_engine) -> int:
    """Serves until a signal comes or the engine fails; returns the process's exit status."""
    began = time.monotonic()
    line = LoadingLine(sys.stderr)
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[LogAbove(sys.stderr, line)],
    )
    logging.getLogger("jaxserve").setLevel(logging.INFO)
    try:
        listener = bind_unix(server.uds) if server.uds else bind(server.host, server.port)
    except OSError as error:
        print(f"error: {_why_not_bound(error, server)}", file=sys.stderr)
        return 1
    if server.host in ("0.0.0.0", "::", "") and not server.api_key and not server.uds:
        log.warning(
            "listening on every network interface without an API key: anyone who reaches this machine may use it"
        )
    run = Run(config, server, listener, start, line, began)
    code = run.until_end()
    if run.loading:
        # The loading thread cannot be interrupted, and a compiler that runs while Python goes down may crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def keep_loaded() -> None:
    """What is loaded stays, and later collections are few: each stops all streams while it looks around."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OSError: the address is in use, or is not this machine's.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def bind_unix(path: str) -> socket.socket:
    """A listening Unix socket; one that a server before has left there is replaced.

    Raises:
        OSError: the path cannot be used, or somebody listens there.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(path) == 0


def _why_not_bound(error: OSError, server: ServerConfig) -> str:
    if server.uds:
        return f"cannot listen on {server.uds}: {error}"
    if error.errno == errno.EADDRINUSE:
        return f"port {server.port} is in use; stop what listens there, or choose another one with --port"
    if error.errno == errno.EACCES:
        return f"port {server.port} needs more rights than this user has; choose one above 1023 with --port"
    return f"cannot listen on {server.host}:{server.port}: {error}"


class Run:
    """One life of a server."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        listener: socket.socket,
        start: Start,
        terminal: LoadingLine,
        began: float,
    ) -> None:
        self._server, self._listener, self._start, self._began = server, listener, start, began
        self._service = Service(config, server)
        self._metrics = Metrics(self._service.names[0], server.metrics_prefix)
        self._line = LogLine()
        self._terminal = terminal
        self._service.limits.on_refusal = self._metrics.on_refusal
        self._url = _reachable_url(listener, "https" if server.ssl_certfile else "http")
        self.loading = False
        """The loading thread is at work."""

    def until_end(self) -> int:
        http = _Http(self._http_config(), self._service, self._server.shutdown_timeout)
        try:
            http.config.load()
        except OSError as error:
            print(f"error: the TLS key or certificate cannot be used: {error}", file=sys.stderr)
            return 1
        with asyncio.Runner(loop_factory=http.config.get_loop_factory()) as runner:
            code = runner.run(self._life(http))
        self._service.templates.close()
        if self._service.engine is not None:
            self._service.engine.close()
        return code

    async def _life(self, http: _Http) -> int:
        self.loading = True
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._load, args=(loop, http), name="loading", daemon=True).start()
        beside = [asyncio.create_task(self._watch(http))]
        if not self._server.disable_log_stats:
            beside.append(asyncio.create_task(self._log_stats()))
        try:
            await http.serve(sockets=[self._listener])
        finally:
            for task in beside:
                task.cancel()
        return 1 if self._service.dead is not None else 0

    def _http_config(self) -> uvicorn.Config:
        options = self._server
        level = options.uvicorn_log_level
        logging.getLogger("uvicorn").setLevel(level.upper())
        return uvicorn.Config(
            build_app(self._service, self._metrics.registry()),
            lifespan="off",
            ws="none",
            log_config=None,
            log_level=level,
            access_log=level in ("info", "debug") and not options.disable_uvicorn_access_log,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(options.shutdown_timeout + 2 * GRACE_SECONDS),
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=ssl.VerifyMode(options.ssl_cert_reqs),
        )

    def _load(self, loop: asyncio.AbstractEventLoop, http: _Http) -> None:
        """Runs in the loading thread."""
        started: Started | None = None
        failure: BaseException | None = None
        gc.disable()  # most of what a start makes stays: to look through it again and again takes half a second
        try:
            started = self._start(self._service.config, progress=self._progress, observers=(self._metrics, self._line))
            keep_loaded()
        except BaseException as error:
            failure = error
        finally:
            gc.enable()
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self._loaded, started, failure, http)

    def _progress(self, stage: str, share: float) -> None:
        self._service.report(stage, share)
        self._terminal.show(stage, share)

    def _loaded(self, started: Started | None, failure: BaseException | None, http: _Http) -> None:
        self.loading = False
        self._terminal.clear()
        if started is None:
            self._service.failure = failure
            if isinstance(failure, ValueError | OSError):
                print(f"error: {failure}", file=sys.stderr)
            else:
                log.error("the engine could not be started", exc_info=failure)
            http.should_exit = True
            return
        self._metrics.settle(_cache_settings(started.config), started.engine.max_model_len)
        self._service.engine = started.engine
        print(self._welcome(started.engine), flush=True)

    def _welcome(self, engine: Engine) -> str:
        name = self._service.names[0]
        key = ' -H "Authorization: Bearer $JAXSERVE_API_KEY"' if self._server.api_key else ""
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'.replace("'", "'\\''")
        url = "" if self._url == "http://127.0.0.1:8000" else f" --url {self._url}"
        path = self._server.uds
        through = f"--unix-socket {path} " if path else ""
        chat = "" if path else f"  {_own_command()} chat{url}\n"
        return (
            f"\n{name} is ready after {time.monotonic() - self._began:.1f} s on {path or self._url}"
            f" (context length {engine.max_model_len})\n\n"
            f"  curl {through}{self._url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
            f"{chat}"
        )

    async def _watch(self, http: _Http) -> None:
        """Ends the process when the engine has failed, after the running requests have heard of it."""
        while self._service.engine is None or self._service.engine.dead is None:
            await asyncio.sleep(WATCH_SECONDS)
        log.critical("the engine has failed, the server ends", exc_info=self._service.engine.dead)
        await asyncio.sleep(GRACE_SECONDS)
        self._service.stop()
        http.should_exit = True

    async def _log_stats(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(LOG_SECONDS)
            now = time.monotonic()
            line = self._line.take(now - last)
            last = now
            if line is not None:
                log.info(line)


class _Http(uvicorn.Server):
    """Drains for as long as it is told, then ends the requests that are left with an error they can read."""

    def __init__(self, config: uvicorn.Config, service: Service, patience: float) -> None:
        super().__init__(config)
        self._service = service
        self._patience = patience

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running = len(self.server_state.tasks)
        if running:
            log.info("shutting down; %d running requests have up to %g s to finish", running, self._patience)
        timer = asyncio.get_running_loop().call_later(self._patience, self._service.stop)
        await super().shutdown(sockets)
        timer.cancel()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn does it, but the process ends with status 0 and not by the signal."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second Ctrl-C ends the wait."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def _cache_settings(config: EngineConfig) -> dict[str, object]:
    return {
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_pages,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "enable_prefix_caching": config.enable_prefix_caching,
        "cache_dtype": "auto",
    }


def _reachable_url(listener: socket.socket, scheme: str) -> str:
    """An address under which this machine reaches the server."""
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://localhost"
    address: tuple[str, int] = listener.getsockname()[:2]
    host, port = address
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host) or host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _own_command() -> str:
    """How to call this command from another terminal: by its name where the shell finds it."""
    here = os.path.abspath(sys.argv[0])
    found = shutil.which("jaxserve")
    if os.path.basename(here) != "jaxserve" or (found is not None and os.path.samefile(found, here)):
        return "jaxserve"
    return here
